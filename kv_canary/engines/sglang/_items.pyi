from typing import Any

import numpy as np
import numpy.typing as npt

def take(sequences: list[Any], places: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> bool: ...

"""A small engine with a bug: beside others a request gets wrong text, and nothing crashes.

    python examples/wrong_text.py                      # the same prompt, alone and beside others
    kv-canary run -- python examples/wrong_text.py     # what goes wrong, and where
    kv-canary run -- python examples/wrong_text.py --fixed

docs/my-text-is-wrong.md goes through it.
"""

import os
import sys

import torch

import kv_canary as kc

PAGE, PAGES, WIDTH, VOCABULARY = 4, 17, 16, 128


class Request:
    def __init__(self, name: str, number: int, prompt: str, new_tokens: int):
        self.name, self.number, self.text = name, number, [ord(c) % VOCABULARY for c in prompt]
        self.prompt, self.new_tokens = len(self.text), new_tokens
        self.pages, self.cached = [], 0

    @property
    def answer(self) -> str:
        return "".join(chr(97 + t % 26) for t in self.text[self.prompt :])


class Engine:
    """One layer of attention over a paged pool, with a prefix cache."""

    def __init__(self, fixed: bool):
        self.fixed, self.free, self.running = fixed, list(range(1, PAGES)), []
        # Whole pages of tokens -> the page that holds their keys and values; oldest first.
        self.prefixes: dict[tuple[int, ...], int] = {}
        draw = torch.Generator().manual_seed(0)
        self.embed, self.places, self.wq, self.wk, self.wv, self.out = (
            torch.randn(*shape, generator=draw)
            for shape in ((VOCABULARY, WIDTH), (64, WIDTH), *[(WIDTH, WIDTH)] * 3, (WIDTH, VOCABULARY))
        )
        self.k, self.v = torch.zeros(2, PAGES * PAGE, WIDTH)
        self.table = torch.zeros(8, 64, dtype=torch.int32)
        # The canary: where the bytes lie, how large things get; its settings come from the environment.
        halves = [
            kc.KvSource(layers=(x.view(PAGES, -1),), page_size=PAGE, bytes_per_token=4 * WIDTH)
            for x in (self.k, self.v)
        ]
        self.pool = kc.KvPool(
            name="kv", num_slots=PAGES * PAGE, k_source=halves[0], v_source=halves[1], device=torch.device("cpu")
        )
        limits = kc.CanaryLimits(max_rows=8, max_requests=8, max_tokens=64, max_len=64)
        mode = os.environ.get("KV_CANARY_MODE", "off")
        config = kc.CanaryConfig.from_env(mode=mode, backend="reference")
        self.canary = kc.CanaryManager([kc.BufferGroup(name="full", pool=self.pool)], limits=limits, config=config)

    def submit(self, request: Request) -> None:
        self.running.append(request)
        for end in range(PAGE, request.prompt, PAGE):
            page = self.prefixes.get(tuple(request.text[:end]))
            if page is None:
                break
            request.pages.append(page)
        request.cached = PAGE * len(request.pages)

    def allocate(self, request: Request) -> int:
        if not self.free:
            in_use = {page for other in self.running for page in other.pages} if self.fixed else set()
            key = next(key for key, page in self.prefixes.items() if page not in in_use)
            self.release(self.prefixes.pop(key), request)
        return self.free.pop()

    def release(self, page: int, request: Request) -> None:
        self.free.append(page)
        slots = torch.arange(page * PAGE, (page + 1) * PAGE)
        self.canary.retire(self.pool, slots, owner=request.number)

    def step(self) -> None:
        for request in list(self.running):
            start, end = request.cached, len(request.text)
            while len(request.pages) * PAGE < end:
                request.pages.append(self.allocate(request))
            slots = torch.tensor([request.pages[i // PAGE] * PAGE + i % PAGE for i in range(end)])
            self.table[request.number, :end] = slots
            tokens, positions = torch.tensor(request.text[start:]), torch.arange(start, end)
            told = kc.ForwardRequest(
                request_id=request.name,
                row=request.number,
                owner=request.number,
                prefix_len=start,
                extend_len=end - start,
                tokens=lambda i, j, text=request.text: text[i:j],
            )
            batch = kc.ForwardBatch(
                requests=[told],
                input_ids=tokens,
                positions=positions,
                out_slots={"full": slots[start:]},
                tables={"full": self.table},
            )
            with self.canary.forward().around(batch):
                hidden = self.embed[tokens] + self.places[positions]
                self.k[slots[start:]], self.v[slots[start:]] = hidden @ self.wk, hidden @ self.wv
                weights = torch.softmax((hidden[-1] @ self.wq) @ self.k[slots].T / WIDTH, dim=0)
                token = int((((weights @ self.v[slots]) + hidden[-1]) @ self.out).argmax())
            request.cached, request.text = end, [*request.text, token]
            if len(request.text) - request.prompt == request.new_tokens:
                self.finish(request)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        for i, page in enumerate(request.pages):
            key = tuple(request.text[: (i + 1) * PAGE])
            if (i + 1) * PAGE <= request.cached and self.prefixes.setdefault(key, page) == page:
                continue
            self.release(page, request)


def serve(prompts: dict[str, str], fixed: bool) -> dict[str, str]:
    """Serve two requests, whose prefixes stay cached, then all of these together; return the answers."""
    engine = Engine(fixed)
    for number, prompt in ((6, SYSTEM), (7, "a chat that is over")):
        engine.submit(Request(f"before {number}", number, prompt, 1))
        engine.step()
    requests = [Request(name, number, prompt, 8) for number, (name, prompt) in enumerate(prompts.items(), start=1)]
    for request in requests:
        engine.submit(request)
    while engine.running:
        engine.step()
    engine.canary.flush()
    engine.canary.close()
    return {request.name: request.answer for request in requests}


SYSTEM = "you are a helpful bot. "
ME, OTHERS = {"me": f"{SYSTEM}hi"}, {"other": "tell me a long story"}

if __name__ == "__main__":
    fixed = "--fixed" in sys.argv[1:]
    alone, beside = serve(ME, fixed), serve({**ME, **OTHERS}, fixed)
    print(f"alone:         {alone['me']}")
    print(f"beside others: {beside['me']}", "" if beside["me"] == alone["me"] else "<- not the same")

"""`python -m kv_canary`: the command line."""

from kv_canary.cli import main

if __name__ == "__main__":
    main(prog_name="python -m kv_canary")

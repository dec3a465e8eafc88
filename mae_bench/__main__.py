"""``python -m mae_bench``."""

from mae_bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

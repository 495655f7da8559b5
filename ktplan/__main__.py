"""`python -m ktplan`, and the function behind the command `ktplan`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C is told in one line even while modules are still being imported."""
    try:
        from ktplan.cli.main import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

"""``python -m orchestrator`` and the console script ``servelab``."""

import sys

from orchestrator import cli


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(cli.main())


if __name__ == "__main__":
    main()

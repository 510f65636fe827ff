"""`python -m lmperf` is the command `lmperf`."""

from lmperf.cli import main

if __name__ == "__main__":
    main()

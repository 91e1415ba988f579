"""`python -m kvrs` is `kvrs`."""

from kvrs.cli import main

if __name__ == "__main__":
    main()

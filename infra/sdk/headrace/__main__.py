"""The command: `headrace`, or `python -m headrace`."""

from headrace import main

if __name__ == "__main__":
    main()

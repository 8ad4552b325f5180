"""The command: `headrace`, or `python -m headrace`."""

from infra.cli.main import main

if __name__ == "__main__":
    main()

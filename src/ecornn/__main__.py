"""``python -m ecornn``: the command line where its script is not on the path."""

from ecornn.cli.app import main

if __name__ == "__main__":
    main()

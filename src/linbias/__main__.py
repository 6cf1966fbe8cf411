"""`python -m linbias` is `linbias`."""

from linbias.cli import main

if __name__ == "__main__":
    main()

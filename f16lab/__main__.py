"""`python -m f16lab …` is the command `f16lab …`."""
from f16lab.cli import main

if __name__ == "__main__":
    main()

"""`python -m maxdiffusion VERB ...`: the command line, where the command itself is on no path."""

from maxdiffusion.cli.main import run

if __name__ == "__main__":
    run()

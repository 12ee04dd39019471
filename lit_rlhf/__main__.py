"""``python -m lit_rlhf`` is ``lit-rlhf``."""

from lit_rlhf.cli import main

if __name__ == "__main__":
    main()

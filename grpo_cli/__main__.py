"""`python -m grpo_cli` is `grpo`."""

from grpo_cli.cli.main import main

main()

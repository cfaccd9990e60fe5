"""grpo-cli: grouped reinforcement learning of language models when memory is short."""

__version__ = "0.1.0"

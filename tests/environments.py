"""Environments as people write them, and as they should not."""

import time
from random import SystemRandom

_WAS_LATE: list[str] = []


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Stop(BaseException):
    """Not an Exception, as what libraries in Rust raise."""


def behave(how):
    """What user's code does wrong, by name."""
    if how == "slow" or (how == "once" and not _WAS_LATE):
        _WAS_LATE.append(how)
        time.sleep(60)
    raises = {"key": KeyError("k"), "mute": Mute(), "stop": Stop(), "next": StopIteration(), "syntax": SyntaxError("s")}
    raises |= {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}
    if how in raises:
        raise raises[how]
    if how == "deep":
        return behave(how)
    returns = {"number": 7, "nothing": "", "much": "x" * 200_000, "half": "a\ud800b", "none": None, "object": object()}
    return returns.get(how, how)


class Responding:
    resets = 0

    def reset(self, **row):
        type(self).resets += 1
        self.row, self.turns = row, []
        return behave(row.get("opening"))

    def respond(self, turn):
        self.turns.append(turn)
        if turn == self.row["answer"]:
            return None
        said = behave(turn)
        return f"{len(self.turns)}: not {turn} {self.row.get('hint')}" if said == turn else said

    def get_reward(self):
        return behave(self.turns[-1]) and 1.0


def now(how: str) -> str:
    """Behave.

    Args:
        how: by name
    """
    return behave(how)


async def later(how: str) -> str:
    return behave(how)


later.__doc__ = now.__doc__


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: a number
        b: another
    """
    return a + b


def untyped(a):
    return a


class Counter:
    """TRL's way: reset, typed methods as tools."""

    def reset(self, **row):
        self.left = int(row["answer"])
        return row.get("opening")

    def take(self, count: int) -> str:
        """Take some.

        Args:
            count: how many
        """
        self.left -= count
        return f"{self.left} left"

    def get_reward(self):
        return self.left


class Hearing:
    """Scored by the turns that it has heard."""

    def reset(self, **row):
        self.heard = row.get("heard", [])
        return f" Hint: {row['answer']}"

    def respond(self, turn):
        self.heard.append(behave(turn))
        return " ".join(self.heard)

    def get_reward(self):
        return len(self.heard)


class NoReset:
    pass


class Random:
    def reset(self, **row):
        pass

    def respond(self, turn):
        return str(SystemRandom().random())

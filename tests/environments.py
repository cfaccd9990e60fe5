"""Environments as people write them, and as they should not."""

import time


class Responding:
    def reset(self, **row):
        self.row, self.turns = row, []

    def respond(self, turn):
        self.turns.append(turn)
        if turn == "raise":
            raise KeyError("k")
        if turn == "number":
            return 7
        if turn == "nothing":
            return ""
        if turn == "much":
            return "x" * 10_000_000
        if turn == "slow":
            time.sleep(60)
        return None if turn == self.row["answer"] else f"{len(self.turns)}: not {turn} {self.row.get('hint')}"


def score(row, turns, reply):
    return {"correct": float(reply == row["answer"]), "turns": len(turns)}


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


class Stepping:
    """skyrl-gym's way."""

    def reset(self, **row):
        self.heard = []

    def step(self, turn):
        self.heard.append(turn)
        said = [{"role": "user", "content": " ".join(self.heard)}]
        return {"observations": said, "reward": 0.0, "done": turn == "end"}

    def get_reward(self):
        return len(self.heard)


class Random:
    def reset(self, **row):
        pass

    def respond(self, turn):
        import random

        return str(random.SystemRandom().random())


class NoReset:
    pass


class Silent:
    def reset(self):
        pass

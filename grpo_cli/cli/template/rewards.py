"""The reward: `task.reward=rewards:score` calls `score` with the parameters that it names."""


def score(reply: str, answer: str) -> dict[str, float]:
    """Parts, each logged as reward/<name>; their sum is the reward. `correct` is what evaluations count.

    Others to ask for: question, row, turns, finished, length; or replies, answers, ... for lists of all.
    """
    *steps, last = reply.split("=")
    return {"correct": float(last.strip() == answer), "worked_out": 0.1 * min(len(steps), 3) / 3}

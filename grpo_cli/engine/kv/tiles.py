"""How a decode step multiplies by pages: which rows query each page, and where each row finds its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from grpo_cli.engine.kv.padding import round_up
from grpo_cli.model.transfer import send


@dataclass(frozen=True)
class Pieces:
    """N pages, each queried by up to C rows; a piece is the result of one page for one row.

    `rows` are the querying rows (row 0 as filler; its results are not read), `of_row` the pieces of each row in the
    order of its keys (N * C: none), `cell` the index of each piece in `of_row` flattened. `first` is the index of the
    page's first key; `held` is how many keys a prompt's page has. `whole`: each row has K pieces. `in_order`: each has
    one, and they are 0, 1, 2, ..., so that nothing has to be moved.
    """

    rows: Int[Tensor, "N C"]
    of_row: Int[Tensor, "R K"]
    cell: Int[Tensor, "NC"]
    first: Int[Tensor, "N"]
    held: Int[Tensor, "N"] | None
    whole: bool
    in_order: bool

    @property
    def pages(self) -> Int[Tensor, "R K"]:
        """Each row's pages in the order of its keys; any number where it has none."""
        return self.of_row // self.rows.shape[1]

    @property
    def seen(self) -> Int[Tensor, "R"]:
        """How many keys of a prompt each row reads."""
        assert self.held is not None, "a prompt's page has a length"
        return torch.cat([self.held, self.held.new_zeros(1)])[self.of_row // self.rows.shape[1]].sum(1)


def own_pieces(pages: np.ndarray, tokens: int, device: torch.device) -> Pieces:
    """For rows and their own `pages` of `tokens` tokens, [R, K] with -1 for none.

    >>> found = own_pieces(np.array([[0, 2], [1, -1]]), 16, torch.device("cpu"))
    >>> found.rows.tolist(), found.of_row.tolist(), found.cell.tolist(), found.first.tolist()
    ([[0], [1], [0]], [[0, 2], [1, 3]], [0, 2, 1], [0, 0, 16])
    """
    (rows, levels), has = pages.shape, pages >= 0
    count = int(pages.max()) + 1
    cell = np.zeros(count, dtype=np.int64)
    cell[pages[has]] = np.flatnonzero(has)
    of_row = np.where(has, pages, count)
    in_order = levels == 1 and bool((pages[:, 0] == np.arange(rows)).all())
    asking, by_row, cells, first = send(device, cell[:, None] // levels, of_row, cell, cell % levels * tokens)
    return Pieces(asking, by_row, cells, first, None, bool(has.all()), in_order)


@dataclass(frozen=True)
class PromptPages:
    """Prompts' pages: those of each entry, [E, K] with -1 for none, out of `count`; tokens of each entry, and of a
    page."""

    pages: np.ndarray
    count: int
    lengths: np.ndarray
    tokens: int


def prompt_pieces(
    entries: np.ndarray, sees: np.ndarray, prompts: PromptPages, multiple: int, fixed: int | None, device: torch.device
) -> Pieces:
    """For rows and the pages of their prompt entries, if they `see` them.

    C is a multiple of `multiple` (see `padding.py`). With `fixed`, so many rows are laid out, those beyond `entries`
    seeing nothing, in a shape that rarely changes (see `graph.py`).

    >>> pages = PromptPages(np.array([[0, 2], [1, -1]]), 3, np.array([20, 9]), 16)
    >>> found = prompt_pieces(np.array([1, 0, 1]), np.ones(3, bool), pages, 4, None, torch.device("cpu"))
    >>> found.rows.tolist(), found.of_row.tolist(), found.held.tolist(), found.in_order
    ([[1, 0, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]], [[4, 12], [0, 8], [5, 12]], [16, 9, 4], False)
    """
    counts = np.bincount(entries, minlength=len(prompts.pages))
    columns = round_up(int(counts.max()), multiple)
    levels = prompts.pages.shape[1]
    if fixed is None:
        levels = int((prompts.pages[entries[sees]] >= 0).sum(1).max(initial=0))
    else:
        columns = 1 << (columns - 1).bit_length()
    order = np.argsort(entries, kind="stable")
    column = np.empty_like(entries)
    column[order] = np.arange(len(entries)) - (np.cumsum(counts) - counts)[entries[order]]
    asking = np.zeros((len(prompts.pages), columns), dtype=np.int64)
    asking[entries, column] = np.arange(len(entries))
    rows, first, held = (
        np.zeros((prompts.count, columns), dtype=np.int64),
        *np.zeros((2, prompts.count), dtype=np.int64),
    )
    entry, level = np.nonzero(prompts.pages >= 0)
    page = prompts.pages[entry, level]
    rows[page], first[page] = asking[entry], level * prompts.tokens
    held[page] = np.clip(prompts.lengths[entry] - first[page], 0, prompts.tokens)
    nothing = prompts.count * columns
    of_row = np.full((len(entries) if fixed is None else fixed, levels), nothing)
    mine = prompts.pages[entries][:, :levels]
    of_row[: len(entries)] = np.where((mine >= 0) & sees[:, None], mine * columns + column[:, None], nothing)
    cell = np.zeros(nothing + 1, dtype=np.int64)
    cell[of_row.ravel()] = np.arange(of_row.size)
    whole = fixed is None and bool((of_row < nothing).all())  # a fixed layout has to fit other rows too
    in_order = whole and levels == 1 and of_row.ravel().tolist() == list(range(nothing))
    asked, by_row, cells, firsts, helds = send(device, rows, of_row, cell[:-1], first, held)
    return Pieces(asked, by_row, cells, firsts, helds, whole, in_order)


@dataclass(frozen=True)
class PageTable:
    """The pages of each row in the order of its keys (0 where it has none), and how many keys of a prompt it reads."""

    of_row: Int[Tensor, "R K"]
    held: Int[Tensor, "R"] | None = None
    whole = in_order = True  # nothing else decides a step's shape


def own_table(pages: np.ndarray, tokens: int, device: torch.device) -> PageTable:
    """Return the table of rows' own pages.

    >>> own_table(np.array([[0, 3], [1, -1]]), 16, torch.device("cpu")).of_row.tolist()
    [[0, 3], [1, 0]]
    """
    return PageTable(*send(device, np.maximum(pages, 0)))


def prompt_table(
    entries: np.ndarray, sees: np.ndarray, prompts: PromptPages, _: int, fixed: int | None, device: torch.device
) -> PageTable:
    """Return the table of the prompts that rows read, if they `see` them. With `fixed`, it has so many rows.

    >>> pages = PromptPages(np.array([[0, 2], [1, -1]]), 3, np.array([20, 9]), 16)
    >>> found = prompt_table(np.array([1, 0, 1]), np.array([True, True, False]), pages, 1, 4, torch.device("cpu"))
    >>> found.of_row.tolist(), found.held.tolist()
    ([[1, 0], [0, 2], [1, 0], [0, 0]], [9, 20, 0, 0])
    """
    rows = len(entries) if fixed is None else fixed
    of_row, held = np.zeros((rows, prompts.pages.shape[1]), dtype=np.int64), np.zeros(rows, dtype=np.int64)
    of_row[: len(entries)] = np.maximum(prompts.pages[entries], 0)
    held[: len(entries)] = np.where(sees, prompts.lengths[entries], 0)
    return PageTable(*send(device, of_row, held))


def sides(by_token: bool) -> tuple[Callable[..., Pieces | PageTable], Callable[..., Pieces | PageTable]]:
    """Return the functions that lay out rows' own pages and prompts' for a step, by `cache.KvLayout.by_token`."""
    return (own_table, prompt_table) if by_token else (own_pieces, prompt_pieces)

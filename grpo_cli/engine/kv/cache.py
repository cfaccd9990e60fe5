"""Paged keys and values: one block of memory, in pages that a row takes as it grows.

      rows' pages: 0 1 2 3 ...        free        ... 2 1 0 :prompts' pages       of each layer, keys and values

A row's pages hold its response; a prompt's are written once by prefill and read by all its samples. Taken pages are
contiguous at their end of the block, so that all of them are the operand of one batched product and reading copies
nothing. A freed page is reused, or filled by moving the outermost page in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv.padding import round_up
from grpo_cli.model.transfer import send

# The least bytes (over all layers) and tokens of a page, so that its lookup and its product are worth the overhead.
# Products of half as many keys took as long each.
PAGE_BYTES, PAGE_TOKENS = 256 * 1024, 32
# A block that is too small grows by 1/SLACK beyond what is needed.
SLACK = 8


@dataclass(frozen=True)
class KvLayout:
    """The shape of one token's keys and values in a model.

    In memory a page is [heads, tokens, dim], an operand for each head, or with `by_token` [tokens, heads, dim], as the
    kernel of a GPU reads it.
    """

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    by_token: bool = False

    @property
    def bytes_per_token(self) -> int:
        """c_kv: 2 * layers * key-value heads * head dimension * bytes per element."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize

    def page(self, tile: int, most: int) -> int:
        """Tokens of a page, a multiple of `tile`, if no row holds more than `most`. With several pages per row it
        depends only on the model and its precision: sums are made page by page, so their bits depend on it."""
        return min(round_up(max(PAGE_TOKENS, -(-PAGE_BYTES // self.bytes_per_token)), tile), round_up(most, tile))


class Region:
    """Pages of one size at one end of a block, numbered from that end, and their owners (a row of `pages` each).

    `used` is one past the outermost taken page; holes below it are free.
    """

    def __init__(self, owners: int, most: int, tokens: int) -> None:
        """At most `most` pages of `tokens` tokens for each owner."""
        self.tokens = tokens
        self.pages = np.full((owners, most), -1, dtype=np.int64)
        self.count = np.zeros(owners, dtype=np.int64)
        self.used = 0
        self.version = 0  # of the page tables: increases with every change
        self._free: list[int] = []
        self._fixed = False

    def fix(self, pages: int) -> None:
        """From now on all `pages` pages are in use, taken or not, and none is ever moved."""
        self.used, self._free, self._fixed = pages, list(range(pages)), True

    @property
    def taken(self) -> int:
        return self.used - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """
        >>> Region(owners=1, most=9, tokens=16).pages_for(33)
        3
        """
        return -(-tokens // self.tokens)

    def lacks(self, owner: int, tokens: int) -> int:
        """How many more pages an owner needs to hold `tokens` tokens."""
        return max(0, self.pages_for(tokens) - int(self.count[owner]))

    def beyond(self, pages: int) -> int:
        """By how many pages `used` grows if so many more are taken."""
        return max(0, pages - len(self._free))

    def take(self, owner: int, pages: int) -> None:
        for place in range(pages):
            if self._free:
                page = heapq.heappop(self._free)
            else:
                page, self.used = self.used, self.used + 1
            self.pages[owner, self.count[owner] + place] = page
        self.count[owner] += pages
        self.version += 1

    def drop(self, owner: int) -> None:
        for page in self.pages[owner, : self.count[owner]].tolist():
            heapq.heappush(self._free, page)
        self.pages[owner], self.count[owner] = -1, 0
        self.version += 1

    def rename(self, source: int, target: int) -> None:
        """Hand the pages of `source` to `target`, which has none."""
        self.pages[target], self.count[target] = self.pages[source], self.count[source]
        self.pages[source], self.count[source] = -1, 0
        self.version += 1

    def closing(self) -> tuple[np.ndarray, np.ndarray]:
        """Which pages must be moved into which holes to make the taken ones contiguous; updates the tables."""
        if self._fixed or not self._free:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        taken = self.taken
        holes = np.array(sorted(page for page in self._free if page < taken), dtype=np.int64)
        outside = set(self._free)
        movers = np.array([page for page in range(taken, self.used) if page not in outside], dtype=np.int64)
        if len(movers):
            now = np.append(np.arange(self.used), -1)  # -1 (no page) maps to itself
            now[movers] = holes
            self.pages = now[self.pages]
        self._free, self.used = [], taken
        self.version += 1
        return movers, holes


def grown(tokens: int, wanted: int, most: int) -> int:
    """The new size of a block of `tokens` when `wanted` are needed: the first time exactly that."""
    return min(most, wanted + (wanted // SLACK if tokens else 0))


class KvArena:
    """The block: of each layer, keys and values of `tokens` tokens, [tokens * heads * dim] numbers each.

    It grows on demand, layer by layer, so that for a moment the old and the new block of one layer's keys coexist. With
    a `budget` it never exceeds these bytes, that moment and what is `set_aside` (for rows that are or will be `parked`)
    included. `worst` is the most tokens that can ever be needed.
    """

    def __init__(
        self, layout: KvLayout, rows: Region, prompts: Region, worst: int, budget: int | None, device: torch.device
    ) -> None:
        self.layout, self.rows, self.prompts = layout, rows, prompts
        self.tokens = 0
        self.parked = 0  # bytes
        self.set_aside = 0  # bytes
        self.peak = 0  # bytes
        self._worst, self._budget, self.device = worst, budget, device
        # Keys of each layer, then values.
        self.blocks: list[Tensor] = [self._block(0) for _ in range(2 * layout.layers)]
        self._views: tuple[list[Tensor], ...] = ()
        self._viewed = (-1, -1, -1)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layout.bytes_per_token

    @property
    def most_tokens(self) -> int:
        """The most tokens that it may ever have."""
        if self._budget is None:
            return self._worst
        return min(self._worst, (self._budget - self.set_aside) // self.layout.bytes_per_token)

    def wanted(self, row_pages: int, prompt_pages: int) -> int:
        """Tokens that it needs if so many more pages are taken."""
        rows, prompts = self.rows, self.prompts
        more = rows.beyond(row_pages) * rows.tokens + prompts.beyond(prompt_pages) * prompts.tokens
        return rows.used * rows.tokens + prompts.used * prompts.tokens + more

    def reach(self) -> int:
        """The most tokens that it can grow to from its current size."""
        if self._budget is None or self.tokens == 0:
            return self.most_tokens
        beside = -(-self.tokens // len(self.blocks))
        return max(self.tokens, self.most_tokens - beside)

    def reserve(self, tokens: int) -> None:
        """Allocate so many at once, before anything is written."""
        self._grow(tokens)

    def has_room(self, row_pages: int, prompt_pages: int) -> bool:
        """Whether so many more pages can be made available."""
        if self.wanted(row_pages, prompt_pages) > self.tokens:
            self.close()
        return self.wanted(row_pages, prompt_pages) <= self.reach()

    def make_room(self, row_pages: int, prompt_pages: int) -> bool:
        """Make room for so many more pages; False if that is impossible."""
        if not self.has_room(row_pages, prompt_pages):
            return False
        wanted = self.wanted(row_pages, prompt_pages)
        if wanted > self.tokens:
            self._grow(grown(self.tokens, wanted, self.reach()))
        return True

    def note_peak(self, beside: int = 0) -> None:
        self.peak = max(self.peak, self.nbytes + self.parked + beside)

    def close(self) -> None:
        """Move pages so that there are no holes between taken ones."""
        for region, left in ((self.rows, True), (self.prompts, False)):
            used = region.used
            movers, holes = region.closing()
            if len(movers):
                for block in self.blocks:
                    view = self._view(block, region, used, left)
                    at = (holes, movers) if left else (used - 1 - holes, used - 1 - movers)
                    target, source = send(self.device, *at)
                    view[target] = view[source]

    def copy(self, source: int, target: int) -> None:
        """Copy one row's page over another."""
        for view in (*self.row_keys, *self.row_values):
            view[target] = view[source]

    def _block(self, tokens: int) -> Tensor:
        """Zeroed, so that no garbage is read, and writable both in inference mode and outside it."""
        size = tokens * self.layout.heads * self.layout.dim
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=self.layout.dtype, device=self.device)

    def _grow(self, tokens: int) -> None:
        rows, prompts = self.rows.used * self.rows.tokens, self.prompts.used * self.prompts.tokens
        if not self.tokens:  # nothing has been written yet
            rows = prompts = 0
        width = self.layout.heads * self.layout.dim
        self._views = ()
        beside = self.blocks[0].nbytes
        for place, old in enumerate(self.blocks):
            new = self._block(tokens)
            new[: rows * width] = old[: rows * width]
            if prompts:
                new[-prompts * width :] = old[-prompts * width :]
            self.blocks[place] = new
        self.tokens, self._viewed = tokens, (-1, -1, -1)
        self.note_peak(beside)

    def _view(self, block: Tensor, region: Region, used: int, left: bool) -> Float[Tensor, "N H T D"]:
        numbers = used * region.tokens * self.layout.heads * self.layout.dim
        part = block[:numbers] if left else block[block.shape[0] - numbers :]
        heads, dim = self.layout.heads, self.layout.dim
        if self.layout.by_token:
            return part.view(used, region.tokens, heads, dim).transpose(1, 2)
        return part.view(used, heads, region.tokens, dim)

    def _all_views(self) -> tuple[list[Tensor], ...]:
        """Keys and values of rows, then of prompts, by layer. Prompts' pages are in reverse order (`prompt_place`)."""
        now = (self.rows.used, self.prompts.used, self.tokens)
        if now != self._viewed:
            keys, values = self.blocks[: self.layout.layers], self.blocks[self.layout.layers :]
            regions = ((self.rows, self.rows.used, True), (self.prompts, self.prompts.used, False))
            self._views = tuple([self._view(b, *region) for b in part] for region in regions for part in (keys, values))
            if self.layout.by_token:
                self._views += tuple([view.transpose(1, 2).flatten(0, 1) for view in some] for some in self._views)
            self._viewed = now
        return self._views

    @property
    def row_keys(self) -> list[Tensor]:
        return self._all_views()[0]

    @property
    def row_values(self) -> list[Tensor]:
        return self._all_views()[1]

    @property
    def prompt_keys(self) -> list[Tensor]:
        return self._all_views()[2]

    @property
    def prompt_values(self) -> list[Tensor]:
        return self._all_views()[3]

    def by_token(self, prompts: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of prompts, or of rows, by layer: the same memory as [tokens of all pages, heads, dim]."""
        assert self.layout.by_token, "pages are laid out by token"
        return self._all_views()[4:][2 * prompts], self._all_views()[4:][2 * prompts + 1]

    def prompt_pages(self, entries: Sequence[int], tokens: int) -> np.ndarray:
        """Indices into `prompt_keys` of the pages of the first `tokens` tokens of each entry, [R, K]."""
        return self.prompt_place(self.prompts.pages[list(entries), : -(-tokens // self.prompts.tokens)])

    def prompt_place(self, pages: np.ndarray) -> np.ndarray:
        """Indices of prompts' pages in `prompt_keys`."""
        return self.prompts.used - 1 - pages

    def write(
        self, layer: int, index: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Float[Tensor, "N D"]
    ) -> None:
        """Write one head's entry per row of `index`, which counts over (page, head, token) of rows flattened."""
        dim, dtype = self.layout.dim, self.layout.dtype
        self.row_keys[layer].view(-1, dim).index_copy_(0, index, keys.to(dtype))
        self.row_values[layer].view(-1, dim).index_copy_(0, index, values.to(dtype))

    def read(self, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """A copy of a row's first `tokens` entries: two tensors [layers, heads, tokens, dim]."""
        (pages,) = send(self.device, self.rows.pages[slot, : self.rows.count[slot]])

        def of(views: Sequence[Tensor]) -> Tensor:
            return torch.stack([view[pages].transpose(0, 1).flatten(1, 2)[:, :tokens] for view in views])

        return of(self.row_keys), of(self.row_values)

    def restore(self, slot: int, keys: Float[Tensor, "L H T D"], values: Float[Tensor, "L H T D"]) -> None:
        """Write back what `read` returned, into pages that the row has."""
        pages = self.rows.pages[slot, None, : self.rows.count[slot]]
        for views, tokens in ((self.row_keys, keys), (self.row_values, values)):
            self._put(views, pages, tokens[:, None])

    def put_prompts(self, entries: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Fill the pages of `entries` with prefilled prompts, [layers, P, heads, width, dim]."""
        most = int(self.prompts.count[list(entries)].max())
        pages = self.prompts.pages[list(entries), :most]
        places = np.where(pages < 0, -1, self.prompt_place(pages))
        for views, tokens in ((self.prompt_keys, keys), (self.prompt_values, values)):
            self._put(views, places, tokens)

    def _put(self, views: Sequence[Tensor], places: np.ndarray, tokens: Float[Tensor, "L P H n D"]) -> None:
        """Write runs of tokens into their pages ([P, pages of each], -1 for none)."""
        size, width = views[0].shape[2], places.shape[1]
        which, at = send(self.device, np.flatnonzero(places >= 0), places[places >= 0])
        for view, some in zip(views, tokens, strict=True):
            whole = F.pad(some[:, :, : width * size], (0, 0, 0, max(0, width * size - some.shape[2])))
            cut = whole.unflatten(2, (width, size)).transpose(1, 2).flatten(0, 1)
            view.index_copy_(0, at, cut[which].to(view.dtype))

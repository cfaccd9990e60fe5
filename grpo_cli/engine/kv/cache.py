"""Keys and values as many as there are: one block of memory, in pages that a row takes as it grows.

      rows' pages: 0 1 2 3 ...        free        ... 2 1 0 :prompts' pages       of each layer, keys and values

A row's pages hold its response, a prompt's are written once by prefill and read by every sample of it. Taken pages lie
side by side at their end of the block, so that all of them are the operand of one batched product and nothing is copied
to be read. What falls free is given to the next one, or closed by moving the outermost page in.
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

# A page of all layers has at least so many bytes, and so many tokens: what is looked up by itself, and is a product by
# itself, is worth it. Products of half as many keys took as long each.
PAGE_BYTES, PAGE_TOKENS = 256 * 1024, 32
# The share by which a block that is too small grows beyond what is wanted.
SLACK = 8


@dataclass(frozen=True)
class KvLayout:
    """The shape of one token's keys and values in a model.

    In memory a page is [heads, tokens, dim], an operand for each head, or `by_token` [tokens, heads, dim], as
    FlashAttention reads it. A page has `least` tokens or more.
    """

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    by_token: bool = False
    least: int = 0

    @property
    def bytes_per_token(self) -> int:
        """c_kv: 2 * layers * key-value heads * head dimension * bytes per element."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize

    def page(self, tile: int, most: int) -> int:
        """Tokens of a page, a multiple of `tile`, where no row holds more than `most`. It depends on nothing but the
        model and its precision as long as there are several: sums are made page by page, and so are their bits."""
        return min(
            round_up(max(PAGE_TOKENS, self.least, -(-PAGE_BYTES // self.bytes_per_token)), tile), round_up(most, tile)
        )


class Region:
    """Pages of one size at one end of a block, counted from that end, and which row has which (a line of `pages` each).

    `used` is how many the taken ones reach to; holes among them are `free`.
    """

    def __init__(self, owners: int, most: int, tokens: int) -> None:
        """At most `most` pages of `tokens` tokens for each owner."""
        self.tokens = tokens
        self.pages = np.full((owners, most), -1, dtype=np.int64)
        self.count = np.zeros(owners, dtype=np.int64)
        self.used = 0
        self.version = 0  # of the page tables: goes up with every change
        self._free: list[int] = []
        self._fixed = False

    def fix(self, pages: int) -> None:
        """All of so many pages are looked at from now on, taken or not, and none is ever moved."""
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
        """How many pages an owner needs more for so many tokens."""
        return max(0, self.pages_for(tokens) - int(self.count[owner]))

    def beyond(self, pages: int) -> int:
        """How far that many more pages reach beyond what is used."""
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
        """What was `source`'s is `target`'s, who had nothing."""
        self.pages[target], self.count[target] = self.pages[source], self.count[source]
        self.pages[source], self.count[source] = -1, 0
        self.version += 1

    def closing(self) -> tuple[np.ndarray, np.ndarray]:
        """Which pages must be moved where, so that those taken are the first ones; the tables say so already."""
        if self._fixed:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        taken = self.taken
        holes = np.array(sorted(page for page in self._free if page < taken), dtype=np.int64)
        outside = set(self._free)
        movers = np.array([page for page in range(taken, self.used) if page not in outside], dtype=np.int64)
        if len(movers):
            now = np.append(np.arange(self.used), -1)  # -1, no page, stays what it is
            now[movers] = holes
            self.pages = now[self.pages]
        if self._free:
            self._free, self.used = [], taken
            self.version += 1
        return movers, holes


def grown(tokens: int, wanted: int, most: int) -> int:
    """What a block of so many tokens grows to where more are wanted: at first just that."""
    return min(most, wanted + (wanted // SLACK if tokens else 0))


class KvArena:
    """The block: of each layer, keys and values of `tokens` tokens, [tokens * heads * dim] numbers each.

    It grows when more is wanted than it has, layer by layer, so that old and new of one layer's keys lie side by side
    for a moment. With a `budget` it never has more bytes, that moment included, nor with what is `set_aside` of it, for
    what is or will be `parked`. `worst` is how many tokens anybody can want.
    """

    def __init__(
        self, layout: KvLayout, rows: Region, prompts: Region, worst: int, budget: int | None, device: torch.device
    ) -> None:
        self.layout, self.rows, self.prompts = layout, rows, prompts
        self.tokens = 0
        self.parked = 0  # bytes
        self.set_aside = 0  # bytes
        self.peak = 0  # bytes
        self._worst, self._budget, self._device = worst, budget, device
        # Keys of each layer, then values.
        self.blocks: list[Tensor] = [self._block(0) for _ in range(2 * layout.layers)]
        self._views: tuple[list[Tensor], ...] = ()
        self._viewed = (-1, -1, -1)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layout.bytes_per_token

    @property
    def most_tokens(self) -> int:
        """How many tokens it may have, now or some time."""
        if self._budget is None:
            return self._worst
        return min(self._worst, (self._budget - self.set_aside) // self.layout.bytes_per_token)

    def wanted(self, row_pages: int, prompt_pages: int) -> int:
        """Tokens that it has to have where so many more pages are taken."""
        rows, prompts = self.rows, self.prompts
        more = rows.beyond(row_pages) * rows.tokens + prompts.beyond(prompt_pages) * prompts.tokens
        return rows.used * rows.tokens + prompts.used * prompts.tokens + more

    def reach(self) -> int:
        """The most tokens that it can grow to from where it is."""
        if self._budget is None or self.tokens == 0:
            return self.most_tokens
        beside = -(-self.tokens // len(self.blocks))
        return max(self.tokens, self.most_tokens - beside)

    def reserve(self, tokens: int) -> None:
        """Have so many at once, before there are any."""
        self._grow(tokens)

    def has_room(self, row_pages: int, prompt_pages: int) -> bool:
        """Whether there can be room for so many more pages."""
        if self.wanted(row_pages, prompt_pages) > self.tokens:
            self.close()
        return self.wanted(row_pages, prompt_pages) <= self.reach()

    def make_room(self, row_pages: int, prompt_pages: int) -> bool:
        """Have room for so many more pages; False if there cannot be."""
        if not self.has_room(row_pages, prompt_pages):
            return False
        wanted = self.wanted(row_pages, prompt_pages)
        if wanted > self.tokens:
            self._grow(grown(self.tokens, wanted, self.reach()))
        return True

    def clear(self) -> None:
        """No row has a page but those that keep theirs for good, and nothing is left of what was written."""
        for entry in range(len(self.prompts.pages)):
            self.prompts.drop(entry)
        for block in self.blocks:
            block.zero_()
        self.parked = self.peak = 0
        self.note_peak()

    def note_peak(self, beside: int = 0) -> None:
        self.peak = max(self.peak, self.nbytes + self.parked + beside)

    def close(self) -> None:
        """Move pages so that none between two taken ones is free."""
        for region, left in ((self.rows, True), (self.prompts, False)):
            used = region.used
            movers, holes = region.closing()
            if len(movers):
                for block in self.blocks:
                    view = self._view(block, region, used, left)
                    at = (holes, movers) if left else (used - 1 - holes, used - 1 - movers)
                    target, source = send(self._device, *at)
                    view[target] = view[source]

    def copy(self, source: int, target: int) -> None:
        """A row's page over another one."""
        for view in (*self.row_keys, *self.row_values):
            view[target] = view[source]

    def _block(self, tokens: int) -> Tensor:
        """Zeroed, so that no garbage is read. It is written in inference mode and outside."""
        size = tokens * self.layout.heads * self.layout.dim
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=self.layout.dtype, device=self._device)

    def _grow(self, tokens: int) -> None:
        rows, prompts = self.rows.used * self.rows.tokens, self.prompts.used * self.prompts.tokens
        if not self.tokens:  # nothing has been written
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
        """Keys and values of rows, of prompts, by layer. A prompt's page stands in them in reverse (`prompt_place`)."""
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
        assert self.layout.by_token, "a page has its tokens one after the other"
        return self._all_views()[4:][2 * prompts], self._all_views()[4:][2 * prompts + 1]

    def prompt_pages(self, entries: Sequence[int], tokens: int) -> np.ndarray:
        """Where the pages of so many tokens of each entry stand in `prompt_keys`, [R, K]."""
        return self.prompt_place(self.prompts.pages[list(entries), : -(-tokens // self.prompts.tokens)])

    def prompt_place(self, pages: np.ndarray) -> np.ndarray:
        """Where pages of prompts stand in `prompt_keys`."""
        return self.prompts.used - 1 - pages

    def write(
        self, layer: int, index: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Float[Tensor, "N D"]
    ) -> None:
        """Write one head's entry per row of `index`, which counts over (page, head, token) of rows flattened."""
        dim, dtype = self.layout.dim, self.layout.dtype
        self.row_keys[layer].view(-1, dim).index_copy_(0, index, keys.to(dtype))
        self.row_values[layer].view(-1, dim).index_copy_(0, index, values.to(dtype))

    def write_tokens(
        self, layer: int, index: Int[Tensor, "R"], keys: Float[Tensor, "R H D"], values: Float[Tensor, "R H D"]
    ) -> None:
        """The same where pages lie `by_token`: an entry per row, `index` counts over (page, token)."""
        for views, some in zip(self.by_token(prompts=False), (keys, values), strict=True):
            views[layer].index_copy_(0, index, some.to(self.layout.dtype))

    def read(self, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """A copy of a row's first `tokens` entries: two tensors [layers, heads, tokens, dim]."""
        (pages,) = send(self._device, self.rows.pages[slot, : self.rows.count[slot]])

        def of(views: Sequence[Tensor]) -> Tensor:
            return torch.stack([view[pages].transpose(0, 1).flatten(1, 2)[:, :tokens] for view in views])

        return of(self.row_keys), of(self.row_values)

    def restore(self, slot: int, keys: Float[Tensor, "L H T D"], values: Float[Tensor, "L H T D"]) -> None:
        """Put back what `read` gave, into pages that the row has."""
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
        """Write runs of tokens into their pages ([P, pages of each], -1 where there is none)."""
        size, width = views[0].shape[2], places.shape[1]
        which, at = send(self._device, np.flatnonzero(places >= 0), places[places >= 0])
        for view, some in zip(views, tokens, strict=True):
            whole = F.pad(some[:, :, : width * size], (0, 0, 0, max(0, width * size - some.shape[2])))
            cut = whole.unflatten(2, (width, size)).transpose(1, 2).flatten(0, 1)
            view.index_copy_(0, at, cut[which].to(view.dtype))

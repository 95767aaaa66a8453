"""Pages of the KV cache: who holds each, and which hold a prefix that another request may begin with.

    free    in no sequence and in no prefix
    held    by one sequence or more; `publish` also puts it into the tree of prefixes
    idle    in the tree alone: the next request with this prefix holds it, or an allocation evicts it

    free --allocate--> held --release--> free        (not published)
                       held --release--> idle        (published)
                       idle --take_prefix--> held
                       idle --allocate--> held       (evicted: the page leaves the tree and has a new holder)

The tree has one node for each full page, keyed by the page's tokens below its parent, so a path from a root is a
prefix; keys of one adapter are of no use to another, so each has a root.  A page enters the tree only when `publish`
says that the GPU has written it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilewright.errors import InputError


@dataclass(eq=False)
class _Node:
    """A full page in the tree."""

    page: int
    tokens: tuple[int, ...]
    parent: "_Node | None"
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)


class PagePool:
    """`pages` pages of `page_size` tokens each."""

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise InputError(f"PagePool: pages is {pages} and page_size {page_size}; both have to be at least 1.")
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._roots: defaultdict[int, _Node] = defaultdict(lambda: _Node(-1, (), None))  # by adapter
        self._nodes: dict[int, _Node] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def held(self) -> int:
        """Number of pages that some sequence holds."""
        return self.pages - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Number of pages that hold a prefix for the next request."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages with undefined content; None, and nothing changes for a sequence, if there are too few.

        Free pages go first, then idle ones, those released longest ago first.
        """
        while len(self._free) < count:
            if not self._evict():
                return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def take_prefix(self, tokens: Sequence[int], adapter: int = 0) -> list[int]:
        """Hold the pages of the longest known prefix of `tokens` under an adapter, in order."""
        pages = [node.page for node in self._path(tokens, adapter)]
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """End one holding of each of `pages`, those of a sequence in order: its last page is evicted first."""
        for page in reversed(list(pages)):
            if not self._holders[page]:
                raise InputError(f"PagePool: page {page} is released, and no sequence holds it.")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._nodes:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], adapter: int = 0) -> None:
        """Make prefixes of `tokens` known, which the GPU has computed under an adapter into `pages`, full pages alone.

        Where two sequences computed the same prefix, the first page stays; the other belongs to its holder alone.
        """
        node = self._roots[adapter]
        for page, chunk in zip(pages, self._chunks(tokens), strict=False):
            below = node.children.get(chunk)
            if below is None:
                if page in self._nodes:  # stands elsewhere: its former parent is gone, and leaves alone are evicted
                    raise InputError(f"PagePool: page {page} is published under two prefixes.")
                below = node.children[chunk] = self._nodes[page] = _Node(page, chunk, node)
            node = below

    def _path(self, tokens: Sequence[int], adapter: int) -> Iterator[_Node]:
        node = self._roots[adapter]
        for chunk in self._chunks(tokens):
            below = node.children.get(chunk)
            if below is None:
                return
            yield below
            node = below

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size))

    def _evict(self) -> bool:
        """Free the leaf that was released longest ago; False if no idle page is a leaf."""
        for page in self._idle:
            node = self._nodes[page]
            if not node.children:
                assert node.parent is not None
                del self._idle[page], self._nodes[page], node.parent.children[node.tokens]
                self._free.append(page)
                return True
        return False

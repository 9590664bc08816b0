"""A few layers of a config at its real widths: random weights, and caches that hold whole contexts."""

import torch
from torch import Tensor, nn

from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format
from megaspan.errors import UserError
from megaspan.model.moe import Router
from megaspan.model.transformer import Transformer

COPIED_PAGES = 4096  # at once: the pages in between take memory of their own
PERIOD = 4  # layers that share a selection


def slice_config(config: ModelConfig, layers: int, experts: int, share: bool) -> ModelConfig:
    """The first `layers` layers of some model of these widths.

    One layer of four selects, or every one without `share`. All are dense, but the last if there are experts.
    UserError for more layers or experts than the config has.
    """
    for option, given, most in (
        ("layers", layers, config.num_hidden_layers),
        ("experts", experts, config.n_routed_experts),
    ):
        if given > most:
            raise UserError(f"--{option} is {given}, but the config has {most}: give no more")
    full = [number % PERIOD == 0 or not share for number in range(layers)]
    dense = layers - 1 if experts else layers
    return config.replace(
        num_hidden_layers=layers,
        num_nextn_predict_layers=0,
        indexer_types=tuple("full" if selects else "shared" for selects in full),
        mlp_layer_types=("dense",) * dense + ("sparse",) * (layers - dense),
        first_k_dense_replace=dense,
        n_routed_experts=experts or config.n_routed_experts,
        dtype="bfloat16",
    )


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device, seed: int = 0) -> Transformer:
    """bf16 weights drawn on the device, of a size that keeps states as they are; routers in float32."""
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Router):
                module.float()
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            parameter.normal_(0.0, 1.0, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for buffer in model.buffers():
        buffer.zero_()
    return model.requires_grad_(False)


def read_bytes(model: Transformer, batch: int) -> float:
    """Bytes of the weights that a step of `batch` tokens reads; of experts, what even routing reaches."""
    config = model.config
    reached = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    total = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            total += parameter.nbytes * (reached if ".experts." in name else 1.0)
    return total


class Contexts:
    """A paged cache for sequences of `length` tokens, whose pages lie in random order.

    slots: sequences that the page table has. distinct: those of them that have pages of their own; the others
    read the same pages again.
    """

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        rows: Format,
        slots: int,
        distinct: int,
        device: torch.device,
        page_size: int,
    ):
        self.length, self.distinct, self.pages_each = length, min(distinct, slots), -(-length // page_size)
        total = self.pages_each * self.distinct
        self.pools = PagePools(config, total, page_size, rows, device=device, mtp=False, scratch=True)
        self.cache = PagedCache(self.pools, slots, self.pages_each)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
        self.pages = order.view(self.distinct, -1)  # [distinct, pages of a sequence]
        for slot in range(slots):
            self.cache.assign(slot, 0, self.pages[slot % self.distinct].tolist())

    def spread(self, length: int) -> None:
        """Copy the first `length` rows of the first sequence to all the others that have pages."""
        page_size = self.pools.page_size
        count = -(-length // page_size)
        for tensors in self.pools.storage.values():
            for rows in tensors:
                by_page = rows.view(torch.uint8).view(-1, rows[0].nbytes * page_size)
                for start in range(0, count, COPIED_PAGES):
                    self._spread_pages(by_page, slice(start, min(start + COPIED_PAGES, count)))

    def _spread_pages(self, by_page: Tensor, some: slice) -> None:
        read = by_page[self.pages[0, some].to(by_page.device)]
        for pages in self.pages[1:, some]:
            by_page[pages.to(by_page.device)] = read

    def row_bytes(self, pool: str) -> int:
        """Bytes of one sequence's rows of a pool, in all layers."""
        form, layers = self.pools.formats[pool], self.pools.layers[pool]
        return self.length * form.nbytes * len(layers)


def tokens(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """[length] int64, random."""
    generator = torch.Generator(device).manual_seed(2)
    return torch.randint(config.vocab_size, (length,), generator=generator, device=device)


def bytes_per_token(config: ModelConfig, rows: Format) -> int:
    """Of the cache, all layers together."""
    pools = PagePools(config, 1, 1, rows, device="meta", mtp=False)
    return pools.nbytes


def contexts_that_fit(config: ModelConfig, rows: Format, length: int, wanted: int, free_bytes: float) -> int:
    """How many sequences of their own pages fit in so much memory, of those that are wanted; at least one."""
    return max(1, min(wanted, int(free_bytes // (length * bytes_per_token(config, rows)))))

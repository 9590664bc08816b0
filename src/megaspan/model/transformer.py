"""The model: one forward pass for training, prefill, decoding and everything after."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.model.attention import Attention
from megaspan.model.batch import Batch
from megaspan.model.cache import Cache
from megaspan.model.forward_pass import ForwardPass
from megaspan.model.layers import MLP, Linear, RMSNorm, Rotation
from megaspan.model.moe import MoE, Router
from megaspan.model.observe import Observer
from megaspan.model.selection import Everything, Selection


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp = MoE(config) if sparse else MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        selection: Selection | Everything | None,
        forward_pass: ForwardPass,
    ) -> tuple[Tensor, Selection | Everything | None]:
        attended, selection = self.self_attn(self.input_layernorm(hidden), selection, forward_pass)
        hidden, normed = self.post_attention_layernorm.after_adding(hidden, attended)
        observed = isinstance(self.mlp, MoE)
        mixed = self.mlp(normed, forward_pass.observe) if observed else self.mlp(normed)
        return hidden + mixed, selection


class Stack(nn.Module):
    """Embedding, decoder layers and final norm, under Hugging Face's name `model`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """GLM-5.2's architecture (`glm_moe_dsa`), parameter names as in Hugging Face."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's numbers have the same bits whatever shares its batch: `set_batch_invariant`."""
        return self.lm_head.invariant

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        selection: Everything | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Read the batch, write its rows to the cache, return final normed hidden states [T, D].

        selection: EVERYTHING for dense attention; None lets the full layers select. observe: called
        with what each layer saw.
        """
        hidden = self.model.embed_tokens(batch.token_ids)
        hidden, _ = self.run_layers(hidden, selection, batch, cache, range(len(self.model.layers)), observe)
        cache.commit(batch)
        return self.model.norm(hidden)

    def run_layers(
        self,
        hidden: Tensor,
        selection: Selection | Everything | None,
        batch: Batch,
        cache: Cache,
        layers: Sequence[int],
        observe: Observer | None = None,
    ) -> tuple[Tensor, Selection | Everything | None]:
        """Run some of the layers: hidden [T, D] and the last selection are all that passes a cut.

        The caller commits the batch to the cache when the last layer has run.
        """
        config = self.config
        rotation = Rotation(batch.positions, config.qk_rope_head_dim, config.rope_theta, self.batch_invariant)
        forward_pass = ForwardPass(batch, cache, cache.table(batch), rotation, observe)
        for layer in layers:
            hidden, selection = self.model.layers[layer](hidden, selection, forward_pass)
        return hidden, selection

    def unembed(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Final hidden states [T, D] → float32 logits [T, V], in `out` if there is one."""
        logits = self.lm_head(hidden)
        return logits.float() if out is None else out.copy_(logits)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew: normal with `initializer_range`, norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = torch.empty(parameter.shape).normal_(
                    0.0, self.config.initializer_range, generator=generator
                )
                parameter.copy_(drawn)
        for module in self.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.zero_()

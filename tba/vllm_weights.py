"""A policy's weights in vLLM's worker: taken in from safetensors, then compared with what the engine computes with.

Before: storage/policies.py fetched the policy's folder; after: tba/engine.py samples from it.

vLLM joins matrices (those of queries, keys and values are one), and its CPU backend packs them and drops the originals.
So a matrix is compared by its products: a row with a single 1 gives a column of the matrix, bit by bit.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tba.weights import Fingerprint, read_weights

# Of each matrix, at another place after each load. Of a policy two steps old 0.8 % of the weights differ: among the
# columns of its smallest matrix that is some 25.
NUM_COLUMNS = 16


class PolicyLoader:
    """Mixed into vLLM's worker (worker_extension_cls), so that weights are read where they are served."""

    def load_policy(self, folder: str) -> str:
        """Streams the weights into the model and returns the fingerprint of these weights.

        Raises: RuntimeError: the model computes with other weights.
        """
        served = Fingerprint()

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read_weights(folder):
                served.add(name, tensor)
                yield name, tensor

        self.reload_weights(weights_iterator=passing())
        model = self.model_runner.get_model()
        _pack_tied_head(model)
        if differs := _first_difference(model, dict(read_weights(folder))):
            raise RuntimeError(
                f"engine: {differs} differs from {folder} after loading, so the engine does not serve the policy"
            )
        return served.hexdigest()


def _pack_tied_head(model: nn.Module) -> None:
    """Packs an output layer that shares the embedding's weights again.

    vLLM 0.32 does so for layers whose own weights were loaded. On a CPU this one would keep the first policy's weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)


def _first_difference(model: nn.Module, weights: dict[str, Tensor]) -> str | None:
    """The name of a weight that the model does not have as in the files; None: there is none.

    Matrices are compared in `NUM_COLUMNS` columns, embeddings and norms whole. Biases of layers with a matrix are not.
    """
    layers = dict(_layers_with_a_matrix(model))
    for name, parameter in model.named_parameters():
        tensor = None if name.rpartition(".")[0] in layers else weights.get(name)
        if tensor is not None and parameter.shape == tensor.shape and not (parameter.cpu() == tensor).all():
            return name
    like = next(model.parameters())
    for name, layer in layers.items():
        matrices = _matrices(model, name, layer, weights)
        if matrices and not _has_columns_of(layer, matrices, like):
            return name
    return None


def _layers_with_a_matrix(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Not those that are quantised: their matrices are not the files'."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        is_head = isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod)
        if is_head or isinstance(method, UnquantizedLinearMethod):
            yield name, layer


def _matrices(model: nn.Module, name: str, layer: nn.Module, weights: dict[str, Tensor]) -> list[Tensor]:
    """The files' matrices that a layer joins, [rows, columns] each. None where the files have other names for them."""
    parent, _, own = name.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(own, [own])
    names = [f"{parent}.{part}.weight" if parent else f"{part}.weight" for part in parts]
    if hasattr(layer, "num_embeddings") and names[0] not in weights:
        names = ["model.embed_tokens.weight"]  # shared with the embedding
    found = [weights.get(each) for each in names]
    return found if all(matrix is not None and matrix.dim() == 2 for matrix in found) else []


def _has_columns_of(layer: nn.Module, matrices: list[Tensor], like: Tensor) -> bool:
    """Whether the layer's matrix has these columns, drawn anew. Its rows may be in another order, as of GPT-NeoX.

    With tensor parallelism it has a part of the rows or of the columns.
    like: has the model's type and device. GPT-2's files have matrices the other way round.
    """
    size = getattr(layer, "input_size", matrices[0].shape[1])
    here = getattr(layer, "input_size_per_partition", size)
    start = random.randrange(max(1, here - NUM_COLUMNS + 1))  # noqa: S311 - any will do
    ones = like.new_zeros(min(NUM_COLUMNS, here), here)
    ones.diagonal(start).fill_(1)
    served = layer.quant_method.apply(layer, ones, None).T.cpu()  # [rows, and padding, columns]
    begin = start + (layer.tp_rank * here if here < size else 0)
    block = slice(begin, begin + len(ones))
    either_way = [of for of in (matrices, [matrix.T for matrix in matrices]) if of[0].shape[1] == size]
    found = [torch.cat([matrix[:, block] for matrix in of]).to(served.dtype) for of in either_way]
    return any(_same_rows(served, of) for of in found)


def _same_rows(served: Tensor, whole: Tensor) -> bool:
    """Whether the rows [rows, columns] that are served are those of the whole matrix, in any order, or a part of them.

    Rows of zeros may come in addition: the output layer has rows for padding.
    """
    key = torch.randint(-(2**62), 2**62, (whole.shape[1],))
    bits = torch.int16 if whole.element_size() == 2 else torch.int32
    hashes = [((rows + 0.0).contiguous().view(bits).long() * key).sum(1) for rows in (served, whole)]
    if len(served) >= len(whole):
        return torch.equal(hashes[0][: len(whole)].sort().values, hashes[1].sort().values)
    return torch.isin(hashes[0], torch.cat([hashes[1], hashes[1].new_zeros(1)])).all().item()

"""A policy's weights in vLLM's worker: taken in from safetensors, then compared with what the engine computes with.

Before: storage/policies.py fetched the policy's folder; after: tba/vllm_engine.py samples from it.

vLLM joins matrices (those of queries, keys and values are one), and its CPU backend packs them and drops the originals.
So a matrix is compared by its products: a row with a single 1 gives a column of the matrix, bit by bit.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tba import lora
from tba.weights import fingerprint, read_weights

# Of each matrix, at another place after each load. Of a policy two steps old 0.8 % of the weights differ: among the
# columns of its smallest matrix that is some 25.
NUM_COLUMNS = 16


class PolicyLoader:
    """Mixed into vLLM's worker (worker_extension_cls), so that weights are read where they are served."""

    def load_policy(self, folder: str, base: str) -> tuple[str, Exception | None]:
        """Takes the weights into the model. Returns the policy's fingerprint, and None.

        base: the model under the policy's adapters, if it has adapters. They are merged into its weights.
        An error is returned, not raised: of several workers, vLLM would leave the other ones' answers unread.
        RuntimeError: the model computes with other weights.
        """
        return _or_error(self._load_policy, folder, base)

    def _load_policy(self, folder: str, base: str) -> str:
        is_adapted = lora.has_adapters(folder)
        if is_adapted:
            weights = dict(lora.merged_weights(base, folder))
        else:  # mapped into memory
            weights = dict(lora.base_weights(folder) if folder == base else read_weights(folder))
        with ThreadPoolExecutor(1) as other_thread:  # sampling stands still meanwhile
            served = other_thread.submit(fingerprint, read_weights(folder) if is_adapted else weights.items())
            self.reload_weights(weights_iterator=iter(weights.items()))
            model = self.model_runner.get_model()
            _refresh_tied_head(model)
            if differs := _first_difference(model, weights):
                raise RuntimeError(_differs(differs, folder))
            return served.result()

    def load_adapters(self, name: int, folder: str, base: str, in_flight: set[int]) -> tuple[str, Exception | None]:
        """Takes in a policy's adapters under a name that no other policy had. base: the folder of the model under them.

        in_flight: names that vLLM keeps. It would drop the least recently used one, read it again when its response
        goes on, and fail if its folder is gone. Returns as `load_policy`.
        """
        return _or_error(self._load_adapters, name, folder, base, in_flight)

    def _load_adapters(self, name: int, folder: str, base: str, in_flight: set[int]) -> str:
        from vllm.exceptions import LoRAAdapterNotFoundError
        from vllm.lora.request import LoRARequest

        weights = dict(read_weights(folder))
        lora.check_base(base, folder)
        for unused in self.list_loras() - in_flight:
            self.remove_lora(unused)
        try:
            self.add_lora(LoRARequest(str(name), name, folder))
        except LoRAAdapterNotFoundError as error:  # pruned meanwhile
            raise FileNotFoundError(str(error)) from error
        manager = self.model_runner.lora_manager._adapter_manager
        place, unseen = manager.lora_index_to_id.index(name), set(weights)
        for layer, side, part, stacked in _adapted(manager):
            of_side = f"{lora.PREFIX}{layer}.lora_{side}.weight"
            if of_side in unseen and not _holds(stacked[part][place, 0], weights[of_side], side):
                raise RuntimeError(_differs(f"the adapter of {layer}", folder))
            unseen.discard(of_side)
        if unseen and self.parallel_config.pipeline_parallel_size == 1:
            raise RuntimeError(f"engine: vLLM has no layer for {min(unseen)} of {folder}")
        return fingerprint(weights.items())

    def check_base(self, base: str) -> tuple[str, Exception | None]:
        """Compares the model that vLLM loaded at its start with its folder."""
        return _or_error(self._check_base, base)

    def _check_base(self, base: str) -> str:
        if differs := _first_difference(self.model_runner.get_model(), dict(lora.base_weights(base))):
            raise RuntimeError(_differs(differs, base))
        return ""


def _differs(what: str, folder: str) -> str:
    return f"engine: {what} differs from {folder} after loading, so the engine does not serve the policy"


def _or_error(method: Callable[..., str], *arguments) -> tuple[str, Exception | None]:
    try:
        return method(*arguments), None
    except Exception as error:
        return "", error


def _adapted(manager) -> Iterator[tuple[str, str, int, Sequence[Tensor]]]:
    """Of each layer that may have adapters: its name in the files, A or B, its place in vLLM's layer, which joins
    several, and that layer's tensors, [adapters, 1, …] at each place."""
    for joined, module in manager.modules.items():
        for part, layer in enumerate(manager.packed_modules.get(joined, [joined])):
            yield layer, "A", part, module.lora_a_stacked
            yield layer, "B", part, module.lora_b_stacked


def _holds(held: Tensor, tensor: Tensor, side: str) -> bool:
    """Whether vLLM's matrix of an adapter begins with the file's: A [r, I], or B [O, r], which vLLM scales.

    With tensor parallelism a worker may hold a part of it, which is not compared.
    """
    rows, columns = tensor.shape
    if held.shape[0] < rows or held.shape[1] < columns:
        return True
    wanted = tensor.to(held.dtype) * (lora.SCALING if side == "B" else 1)
    return torch.equal(held[:rows, :columns].cpu(), wanted)


def _refresh_tied_head(model: nn.Module) -> None:
    """Gives an output layer that shares the embedding's weights the matrix that vLLM packed for the embedding.

    vLLM 0.32 packs those of layers whose own weights were loaded. On a CPU this one would keep the first policy's.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
        layers = [layer for layer in layers if hasattr(layer, "cpu_linear")]  # quantised ones have none
        heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
        packed = {id(layer.weight): layer.cpu_linear for layer in layers if layer not in heads}
        for head in heads:
            head.cpu_linear = packed.get(id(head.weight), head.cpu_linear)


def _first_difference(model: nn.Module, weights: dict[str, Tensor]) -> str | None:
    """The name of a weight that the model does not have as in the files; None: none was found.

    Compared: matrices in `NUM_COLUMNS` columns; embeddings and norms whole. Not compared: experts, quantised layers,
    their biases, and weights that the model and its files name differently.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}  # of a shared one the first
    for full_name, layer in model.named_modules():
        name = _plain(full_name)
        if isinstance(layer, BaseLayerWithLoRA):  # its base_layer follows
            continue
        for part, parameter in _readable(name, layer):
            tensor = weights.get(part)
            is_comparable = tensor is not None and parameter.shape == tensor.shape
            if is_comparable and not torch.equal(parameter.cpu(), tensor.to(parameter.dtype)):
                return part
        matrices = _matrices(model, name, layer, names, weights)
        if matrices and not _has_columns_of(layer, matrices):
            return name
    return None


def _plain(name: str) -> str:
    """A name without vLLM's wrapper of layers that may get adapters."""
    return f"{name}.".replace(".base_layer.", ".").removesuffix(".")


def _readable(name: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of an embedding or a norm. Those of other layers may be packed, or in another order."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod):
        yield from layer.named_parameters(name, recurse=False)


def _matrices(
    model: nn.Module, name: str, layer: nn.Module, names: dict[int, str], weights: dict[str, Tensor]
) -> list[Tensor]:
    """The files' matrices, [rows, columns] each, of which the layer has one, in its order; none: it is not compared.

    names: of the model's parameters, by their ids.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
        parts = [names.get(id(layer.weight))]  # the embedding's where they share it
    elif isinstance(method, UnquantizedLinearMethod):
        parent, _, own_name = name.rpartition(".")
        joined = getattr(model, "packed_modules_mapping", {}).get(own_name, [own_name])
        parts = [f"{parent}.{part}.weight" if parent else f"{part}.weight" for part in joined]
    else:
        return []
    found = [weights.get(part) for part in parts]
    return found if all(matrix is not None and matrix.dim() == 2 for matrix in found) else []


def _has_columns_of(layer: nn.Module, matrices: list[Tensor]) -> bool:
    """Whether the layer's matrix has these columns, drawn anew. Rows may be in another order: some loaders change it.

    With tensor parallelism the layer has a part of the rows or of the columns. GPT-2's files have matrices the other
    way round.
    """
    num_columns = getattr(layer, "input_size", matrices[0].shape[1])
    num_here = getattr(layer, "input_size_per_partition", num_columns)
    start = random.randrange(max(1, num_here - NUM_COLUMNS + 1))  # noqa: S311 - any will do
    ones = layer.weight.new_zeros(min(NUM_COLUMNS, num_here), num_here)
    ones.diagonal(start).fill_(1)
    served = layer.quant_method.apply(layer, ones, None).T.cpu()  # [rows, and padding, columns]
    begin = start + (layer.tp_rank * num_here if num_here < num_columns else 0)
    block = slice(begin, begin + len(ones))
    either_way = (matrices, [matrix.T for matrix in matrices])
    fitting = [pieces for pieces in either_way if all(piece.shape[1] == num_columns for piece in pieces)]
    found = [torch.cat([matrix[:, block] for matrix in pieces]).to(served.dtype) for pieces in fitting]
    is_part = getattr(layer, "tp_size", 1) > 1
    return any(_same_rows(served, whole, is_part) for whole in found)


def _same_rows(served: Tensor, whole: Tensor, is_part: bool) -> bool:
    """Whether the rows [rows, columns] that are served are those of the whole matrix, in any order, or a part of them.

    Rows of zeros may come in addition: the output layer has rows for padding.
    """
    if torch.equal(served[: len(whole)], whole):
        return True
    key = torch.randint(-(2**62), 2**62, (whole.shape[1],))
    bits, tiny = torch.int16 if whole.element_size() == 2 else torch.int32, torch.finfo(whole.dtype).tiny

    def hashes(rows: Tensor) -> Tensor:
        """A product may make a number below the smallest normal one zero, and zero has two signs."""
        return (rows.where(rows.abs() >= tiny, 0).contiguous().view(bits).long() * key).sum(1)

    if is_part:
        return torch.isin(hashes(served), torch.cat([hashes(whole), key.new_zeros(1)])).all().item()
    return torch.equal(hashes(served[: len(whole)]).sort().values, hashes(whole).sort().values)

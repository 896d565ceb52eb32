"""Generation: vLLM if it is installed, else transformers' generate. Both replace the policy's weights in place.

vLLM samples several batches of prompts at once, a token a step, and takes in a policy between two steps: a response in
flight goes on with the new weights and the keys and values that it has. Each token's log-probability is that of the
weights that sampled it. Such a mixture of policies is a behavior policy like any other to the Trajectory Balance loss.
"""

import importlib.util
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypedDict, Unpack

from tba.models import is_mixture_of_experts
from tba.precision import compute_dtype, default_device
from tba.weights import fingerprint, read_weights


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that the engine serves or has served."""

    step: int
    fingerprint: str  # of the weights that the engine took in


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    tokens: list[int]  # including the stop token
    logprobs: list[float]  # of each token as it was sampled: after temperature and top-p
    finish_reason: str  # "stop" or "length"
    policies: list[tuple[int, ServedPolicy]]  # in order: place of the first token that each policy sampled


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Temperature 0 is greedy."""

    num_samples: int
    temperature: float
    top_p: float
    max_tokens: int
    stop_tokens: list[int]


class Engine(Protocol):
    """Holds one policy and samples from it. One thread at a time may call it."""

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Serves the policy in `folder` from now on, also for the rest of responses in flight."""

    def start(self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool) -> int:
        """Begins a batch: `num_samples` responses to each prompt. Returns its number.

        `first`: before the prompts of other batches that have not begun.
        """

    def step(self) -> dict[int, list[list[Response]]]:
        """Samples on. Returns the batches that are whole now: by number, each prompt's responses, in order."""

    def has_waiting(self) -> bool:
        """Whether prompts wait that have not begun."""

    def abort(self) -> None:
        """Ends all batches without their responses."""


class Limits(TypedDict):
    """What every engine is told."""

    max_tokens: int  # of prompt and response together
    max_sequences: int  # responses in flight at once
    seed: int
    threads: int  # of the CPU


def make_engine(
    folder: Path, *, arguments: Mapping[str, Any] = MappingProxyType({}), **limits: Unpack[Limits]
) -> Engine:
    """An engine for policies of the shape in `folder`. No policy is served until `load`.

    arguments: further ones of vllm.LLM. Raises: ValueError: vLLM has to take them, and is not used.
    """
    if importlib.util.find_spec("vllm") and not _is_mixture_on_a_cpu(folder):
        return VllmEngine(folder, arguments=arguments, **limits)
    if unknown := set(arguments) - {"gpu_memory_utilization"}:
        raise ValueError(
            f"search.engine: {', '.join(sorted(unknown))} are arguments of vLLM, which is not installed, or not used "
            "because the model is a mixture of experts and this machine has no GPU"
        )
    return TransformersEngine(folder, **limits)


def _is_mixture_on_a_cpu(folder: Path) -> bool:
    """vLLM 0.32's CPU backend samples from other experts than it was given: log-probabilities are 2 to 10 nats off."""
    return default_device() == "cpu" and is_mixture_of_experts(folder)


class VllmEngine:
    """vLLM in this process, without a connection. Worker processes, if several GPUs need them, end with this one."""

    def __init__(
        self, folder: Path, *, arguments: Mapping[str, Any] = MappingProxyType({}), **limits: Unpack[Limits]
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # take_gpus used CUDA, which survives no fork
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("OMP_NUM_THREADS", str(limits["threads"]))  # read by the CPU backend only
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM
        from vllm.platforms import current_platform

        is_cpu = current_platform.is_cpu()
        usual = {
            "dtype": compute_dtype(current_platform.device_type),
            "max_model_len": limits["max_tokens"],
            # The CPU's default, 128 tokens, is longer than many a prompt, and only whole blocks are computed once for
            # all samples of a prompt. 32 is the smallest that its kernels take.
            "block_size": 32 if is_cpu else None,
            "enforce_eager": is_cpu,  # compiling costs minutes there and gains nothing at this size
            "disable_log_stats": True,
        }
        self._llm = LLM(
            **(usual | dict(arguments)),
            model=str(folder),
            seed=limits["seed"],
            max_num_seqs=limits["max_sequences"],
            logprobs_mode="processed_logprobs",
            trust_remote_code=False,
            worker_extension_cls="tba.vllm_weights.PolicyLoader",
        )
        self._engine = self._llm.llm_engine
        self._policies: list[ServedPolicy] = []  # each that was loaded; its place is its version's name in vLLM
        self._numbers = count()
        self._max_sequences = limits["max_sequences"]
        self._waiting: deque[tuple[str, list[int], Sampling]] = deque()  # prompts that vLLM does not have yet, by name
        self._batches: dict[int, list[list[Response] | None]] = {}  # each prompt's responses; None: not sampled yet
        self._finished: list = []  # outputs of vLLM that `step` has not taken in

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Raises: RuntimeError: the engine does not serve the policy. `abort` before the next step."""
        self._pause()
        found = self._llm.collective_rpc("load_policy", args=(str(folder),))  # of each worker
        for _, error in found:
            if error is not None:
                raise error
        ((fingerprint, _),) = set(found)
        self._policies.append(ServedPolicy(policy_step, fingerprint))
        self._engine.set_weight_version(self._version)
        self._engine.wake_up(tags=["scheduling"])
        return self._policies[-1]

    def _pause(self) -> None:
        """Takes in what has been sampled, so that no token counts as the next policy's.

        vLLM has several steps in flight: two with asynchronous scheduling, more with pipeline parallelism.
        """
        self._engine.sleep(level=0, mode="keep")
        for _ in range(max(2, self._engine.vllm_config.max_concurrent_batches)):
            self._finished += self._engine.step()

    @property
    def _version(self) -> str:
        """The served policy's name in vLLM."""
        return str(len(self._policies) - 1)

    def start(self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool) -> int:
        number = next(self._numbers)
        asked = zip(range(len(prompts)), prompts, sampling, strict=True)
        waiting = [(f"{number}/{place}", prompt, of_prompt) for place, prompt, of_prompt in asked]
        self._batches[number] = [None] * len(prompts)
        self._waiting.extendleft(reversed(waiting)) if first else self._waiting.extend(waiting)
        return number

    def _fill(self) -> None:
        """Hands prompts to vLLM while it has room: those that still wait begin with a policy that is loaded meanwhile.

        The salt keeps the keys and values that another policy computed for the same prompt from a new response.
        """
        while self._waiting and self._engine.get_num_unfinished_requests() < self._max_sequences:
            name, prompt, sampling = self._waiting.popleft()
            asked = {"prompt_token_ids": prompt, "cache_salt": self._version}
            self._engine.add_request(name, asked, self._parameters(sampling))

    @staticmethod
    def _parameters(sampling: Sampling):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_tokens,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> dict[int, list[list[Response]]]:
        self._fill()
        finished, self._finished = self._finished + self._engine.step(), []
        for output in finished:
            number, place = map(int, output.request_id.split("/"))
            completions = sorted(output.outputs, key=lambda completion: completion.index)
            self._batches[number][place] = [self._response(completion) for completion in completions]
        whole = [number for number, found in self._batches.items() if None not in found]
        return {number: self._batches.pop(number) for number in whole}

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def abort(self) -> None:
        names = [f"{number}/{place}" for number, found in self._batches.items() for place in range(len(found))]
        self._engine.abort_request(names)
        for of in (self._waiting, self._batches, self._finished):
            of.clear()

    def _response(self, completion) -> Response:
        tokens = list(completion.token_ids)
        logprobs = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
        policies = [(span.start, self._policies[int(span.version)]) for span in completion.weight_versions]
        return Response(tokens, [min(value, 0.0) for value in logprobs], completion.finish_reason, policies)


class WholeBatches:
    """An engine's batches if it samples each in one step, by `sample`."""

    def __init__(self) -> None:
        self._numbers, self._waiting = count(), deque()

    def start(self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool) -> int:
        number = next(self._numbers)
        self._waiting.insert(0 if first else len(self._waiting), (number, prompts, sampling))
        return number

    def step(self) -> dict[int, list[list[Response]]]:
        number, *asked = self._waiting.popleft()
        return {number: self.sample(*asked)}

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def abort(self) -> None:
        self._waiting.clear()


SCORES_BYTES = 4 * 1024**3  # of memory for the scores of TransformersEngine


class TransformersEngine(WholeBatches):
    """transformers' generate: slower, but available with torch alone."""

    def __init__(self, folder: Path, **limits: Unpack[Limits]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        super().__init__()
        torch.set_num_threads(limits["threads"])
        torch.manual_seed(limits["seed"])
        self._served = ServedPolicy(-1, "")  # not the published one: the model's own weights
        self._max_sequences = limits["max_sequences"]
        self._device = default_device()
        self._dtype = compute_dtype(self._device)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype, trust_remote_code=False)
        self._model.to(self._device).eval()
        # The folder's generation_config.json may change the sampling (a repetition penalty, min_p): it is not used.
        self._model.generation_config = GenerationConfig()

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Raises: RuntimeError: the folder has other weights than the model."""
        weights = dict(read_weights(folder))
        if any(".experts." in name for name in weights):  # each by itself; the model has one tensor of all
            self._load_experts(folder)
            self._served = ServedPolicy(policy_step, fingerprint(weights.items()))
            return self._served
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = set(self._model.all_tied_weights_keys)
        if unexpected or set(missing) - tied:
            differs = unexpected + sorted(set(missing) - tied)
            raise RuntimeError(f"engine: {folder} has other weights than the model: {differs}")
        named = dict(self._model.named_parameters())
        weights = ((name, named[name].to(tensor.dtype)) for name, tensor in read_weights(folder))
        self._served = ServedPolicy(policy_step, fingerprint(weights))
        return self._served

    def _load_experts(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype, trust_remote_code=False)
        self._model.load_state_dict(loaded.state_dict())

    def sample(self, prompts: list[list[int]], sampling: Sequence[Sampling]) -> list[list[Response]]:
        """`num_samples` responses to each prompt."""
        responses: list[list[Response]] = []
        asked = zip(prompts, sampling, strict=True)
        for common, alike in groupby(asked, key=lambda pair: pair[1]):  # generate has one sampling for all
            of_sampling = [prompt for prompt, _ in alike]
            rows = max(1, self._max_rows(common.max_tokens))
            at_once = max(1, rows // common.num_samples)
            for start in range(0, len(of_sampling), at_once):
                responses += self._in_parts(of_sampling[start : start + at_once], common, rows)
        return responses

    def _in_parts(self, prompts: list[list[int]], sampling: Sampling, max_samples: int) -> list[list[Response]]:
        """The responses to each prompt, at most `max_samples` of them at once."""
        parts = []
        for first in range(0, sampling.num_samples, max_samples):
            num_samples = min(max_samples, sampling.num_samples - first)
            parts.append(self._generate(prompts, replace(sampling, num_samples=num_samples)))
        return [[response for part in of_prompt for response in part] for of_prompt in zip(*parts, strict=True)]

    def _max_rows(self, max_tokens: int) -> int:
        """Responses sampled at once: generate keeps the scores of all tokens, and they are copied twice."""
        bytes_of_row = 3 * 4 * max_tokens * self._model.config.get_text_config().vocab_size
        return min(self._max_sequences, SCORES_BYTES // bytes_of_row)

    def _generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Response]]:
        import torch

        pad, longest = sampling.stop_tokens[0], max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]  # on the left: all responses begin at one column
        greedy = sampling.temperature == 0
        output = self._model.generate(
            torch.tensor([[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)], device=self._device),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=self._device),
            do_sample=not greedy,
            **({} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}),
            num_return_sequences=sampling.num_samples,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sampling.stop_tokens,
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, longest:]  # [prompts * samples, response tokens]
        scores = torch.stack(output.scores, dim=1).float().log_softmax(dim=-1)  # [.., .., V]
        logprobs = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        flat = [self._response(*row, sampling) for row in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
        return [flat[start : start + sampling.num_samples] for start in range(0, len(flat), sampling.num_samples)]

    def _response(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Response:
        stops = [place for place, token in enumerate(tokens) if token in sampling.stop_tokens]
        length = stops[0] + 1 if stops else len(tokens)
        return Response(tokens[:length], logprobs[:length], "stop" if stops else "length", [(0, self._served)])

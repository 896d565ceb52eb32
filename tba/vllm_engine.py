"""Generation by vLLM: batches sampled together, policies taken in between two steps.

Before: tba/engines.py chooses it; after: tba/generator.py takes its responses. The workers have tba/vllm_weights.py.

On a GPU, a policy that is adapters alone gets a name of its own in vLLM, and the weights under it stay. Responses in
flight go on with the adapters that they began with. On a CPU its adapters are merged into the weights.
"""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack, get_args

from tba import lora
from tba.engine import EngineOptions, Response, Sampling, ServedPolicy
from tba.precision import compute_dtype

if TYPE_CHECKING:  # its import takes seconds
    from vllm.lora.request import LoRARequest

# Policies by adapters that responses in flight may have begun with. vLLM has memory for so many, and keeps the newest
# besides. While there are so many, further responses begin with the newest of these.
ADAPTERS_IN_FLIGHT = 8
# Responses that vLLM samples at a time; the others of a round wait here. It refuses more than the tokens of a step, by
# default 4,096 on a CPU, and tries the sampler with so many rows of logits when it starts.
MAX_SEQUENCES = 1024
ENVIRONMENT = {  # of vLLM, unless the user has set a variable
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # free_share (infra/gpus.py) used CUDA, which survives no fork
    # A CPU has the first model runner only, so this one is tested. vLLM would take the second one on a GPU.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Beginning:
    """The policy that a response begins with."""

    policy: ServedPolicy
    version: str  # its name in vLLM
    adapters: "LoRARequest | None"  # of the policy, with which all of the response is sampled; None: it has none


@dataclass(frozen=True)
class Asked:
    """A response that vLLM samples, or is to sample."""

    prompt: list[int]
    sampling: Sampling
    beginning: Beginning


class VllmEngine:
    """vLLM in this process, without a connection. Worker processes, if several GPUs need them, end with this one."""

    def __init__(
        self,
        folder: Path,
        *,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        lora_rank: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Arguments as of tba.engines.make_engine."""
        of_threads = {"OMP_NUM_THREADS": str(options["threads"])}  # read by the CPU backend only
        for name, value in (ENVIRONMENT | of_threads).items():
            os.environ.setdefault(name, value)
        from vllm import LLM
        from vllm.platforms import current_platform

        is_cpu = current_platform.is_cpu()
        usual = {
            "dtype": compute_dtype(current_platform.device_type),
            "max_model_len": options["max_tokens"],
            # The CPU's default, 128 tokens, is longer than many a prompt, and only whole blocks are computed once for
            # all samples of a prompt. 32 is the smallest that its kernels take.
            "block_size": 32 if is_cpu else None,
            "enforce_eager": is_cpu,  # compiling costs minutes there and gains nothing at this size
            "disable_log_stats": True,
        }
        usual |= arguments
        tokens_of_a_step = arguments.get("max_num_batched_tokens", 4096)
        self._max_sequences = min(options["max_sequences"], MAX_SEQUENCES, tokens_of_a_step)
        serves_adapters = usual.pop("enable_lora", _has_fast_adapter_kernels(is_cpu, usual["dtype"]))  # tests give it
        usual |= _room_for_adapters(folder, lora_rank, serves_adapters)
        self._llm = LLM(
            **usual,
            model=str(folder),
            seed=options["seed"],
            max_num_seqs=self._max_sequences,
            logprobs_mode="processed_logprobs",
            trust_remote_code=False,
            worker_extension_cls="tba.vllm_weights.PolicyLoader",
        )
        self._engine = self._llm.llm_engine
        self._folder, self._has_own_weights, self._is_compared = str(folder), True, False  # compared: its weights
        self._serves_adapters = self._engine.vllm_config.lora_config is not None
        self._adapters: LoRARequest | None = None  # of the served policy; None: its weights have them
        self._adapter_names = count(1)
        self._policies: list[ServedPolicy] = []  # each that was loaded; its place is its version's name in vLLM
        self._numbers = count()
        self._waiting: deque[tuple[str, list[int], Sampling]] = deque()  # not in vLLM yet; batch/prompt/sample
        self._asked: dict[str, Asked] = {}  # by name
        self._batches: dict[int, list[list[Response | None]]] = {}  # each prompt's responses; None: not sampled yet
        self._finished: list = []  # outputs of vLLM that `step` has not taken in

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Raises: RuntimeError: the engine does not serve the policy. `abort` before the next step."""
        self._pause()
        by_adapters = self._serves_adapters and lora.has_adapters(folder)
        if self._policies and by_adapters != (self._adapters is not None):
            self._begin_again(set(self._asked))  # the weights under adapters change, or adapters come
        elif not by_adapters:
            self._begin_again(self._not_begun())
        fingerprint = self._load_adapters(str(folder)) if by_adapters else self._load_weights(str(folder))
        self._policies.append(ServedPolicy(policy_step, fingerprint))
        self._engine.set_weight_version(self._version)
        self._engine.wake_up(tags=["scheduling"])
        return self._policies[-1]

    def _load_weights(self, folder: str) -> str:
        self._adapters, self._has_own_weights = None, False
        fingerprint = self._of_all_workers("load_policy", folder, self._folder)
        self._has_own_weights = self._is_compared = folder == self._folder
        return fingerprint

    def _load_adapters(self, folder: str) -> str:
        from vllm.lora.request import LoRARequest

        if not self._has_own_weights:
            self._load_weights(self._folder)
        if not self._is_compared:
            self._of_all_workers("check_base", self._folder)
            self._is_compared = True
        name = next(self._adapter_names)
        fingerprint = self._of_all_workers("load_adapters", name, folder, self._folder, set(self._in_flight()))
        self._adapters = LoRARequest(str(name), name, folder)
        return fingerprint

    def _of_all_workers(self, method: str, *arguments) -> str:
        """What this method of tba.vllm_weights returns in each worker. Raises: RuntimeError."""
        found = self._llm.collective_rpc(method, args=arguments)
        for _, error in found:
            if error is not None:
                raise error
        ((fingerprint, _),) = set(found)
        return fingerprint

    def _not_begun(self) -> set[str]:
        """Responses that wait in vLLM: for memory, or for a step with room for their prompt."""
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id for state in states if state.is_prefilling}

    def _begin_again(self, names: set[str]) -> None:
        """These responses wait again, outside vLLM; those that are whole stay."""
        finished = {output.request_id for output in self._finished}
        again = {name: asked for name, asked in self._asked.items() if name in names - finished}
        self._engine.abort_request(list(again))
        for name, asked in reversed(again.items()):
            self._waiting.appendleft((name, asked.prompt, asked.sampling))
            del self._asked[name]

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
        waiting = [
            (f"{number}/{place}/{sample}", prompt, of_prompt)
            for place, (prompt, of_prompt) in enumerate(zip(prompts, sampling, strict=True))
            for sample in range(of_prompt.num_samples)
        ]
        self._batches[number] = [[None] * of_prompt.num_samples for of_prompt in sampling]
        self._waiting.extendleft(reversed(waiting)) if first else self._waiting.extend(waiting)
        return number

    def _fill(self) -> None:
        """Hands responses to vLLM, each as a request, while it has room: those that still wait begin with a policy that
        is loaded meanwhile.

        The salt keeps the keys and values that another policy computed for the same prompt from a new response. So a
        load takes back those that wait in vLLM.
        """
        while self._waiting and self._engine.get_num_unfinished_requests() < self._max_sequences:
            beginning = self._beginning()
            name, prompt, sampling = self._waiting.popleft()
            asked = {"prompt_token_ids": prompt, "cache_salt": beginning.version}
            self._engine.add_request(name, asked, self._parameters(sampling), lora_request=beginning.adapters)
            self._asked[name] = Asked(prompt, sampling, beginning)

    def _beginning(self) -> Beginning:
        """The served policy; if vLLM has no memory for its adapters, the newest policy in flight."""
        in_flight = self._in_flight() if self._adapters else {}
        if len(in_flight) < ADAPTERS_IN_FLIGHT or self._adapters.lora_int_id in in_flight:
            return Beginning(self._policies[-1], self._version, self._adapters)
        return in_flight[max(in_flight)]

    def _in_flight(self) -> dict[int, Beginning]:
        """The policies by adapters that responses in flight began with, by their adapters' numbers, which rise."""
        begun = (asked.beginning for asked in self._asked.values())
        return {beginning.adapters.lora_int_id: beginning for beginning in begun if beginning.adapters}

    @staticmethod
    def _parameters(sampling: Sampling):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
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
            number, place, sample = map(int, output.request_id.split("/"))
            (completion,) = output.outputs
            self._batches[number][place][sample] = self._response(completion, self._asked.pop(output.request_id))
        whole = [number for number, found in self._batches.items() if all(None not in of for of in found)]
        return {number: self._batches.pop(number) for number in whole}

    def num_waiting(self) -> int:
        return len({name.rpartition("/")[0] for name, _, _ in self._waiting})

    def abort(self) -> None:
        self._engine.abort_request(list(self._asked))
        for of in (self._waiting, self._asked, self._batches, self._finished):
            of.clear()

    def _response(self, completion, asked: Asked) -> Response:
        tokens = list(completion.token_ids)
        logprobs = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
        if asked.beginning.adapters is None:
            policies = [(span.start, self._policies[int(span.version)]) for span in completion.weight_versions]
        else:
            policies = [(0, asked.beginning.policy)]
        return Response(tokens, [min(value, 0.0) for value in logprobs], completion.finish_reason, policies)


def _has_fast_adapter_kernels(is_cpu: bool, dtype: Any) -> bool:
    """Whether vLLM has fast kernels for adapters. On a CPU it samples a quarter as fast with them as without."""
    return not is_cpu and str(dtype) not in ("float32", "float", "torch.float32")


def _room_for_adapters(folder: Path, rank: int | None, serves: bool) -> dict[str, Any]:
    """vLLM's arguments for adapters of this rank. None if it does not serve them, or renames the model's layers.

    Then adapters are merged into the weights.
    """
    if rank is None or not serves:
        return {}
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    (name, *_) = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    ranks = [largest for largest in get_args(MaxLoRARanks) if largest >= rank]
    registered = ModelRegistry.models.get(name)
    model = registered and registered.load_model_cls()
    if not ranks or model is None or not supports_lora(model) or _renames(getattr(model, "hf_to_vllm_mapper", None)):
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": min(ranks),
        "max_loras": ADAPTERS_IN_FLIGHT,
        "max_cpu_loras": ADAPTERS_IN_FLIGHT + 1,
    }


def _renames(mapper: Any) -> bool:
    """Whether vLLM's mapper of weights' names does more than join layers."""
    kinds = ("renaming", "regex", "substr", "prefix", "suffix")
    return any(getattr(mapper, f"orig_to_new_{kind}", None) for kind in kinds)

"""A published policy whose only file says of which step and attempt it is."""

from storage import kept_policies, policies
from storage.store import RunStore


def publish(store: RunStore, folder, step: int, attempt: int = 1, final: bool = False) -> policies.PolicyRef:
    """What the Trainer does with a policy."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(f"policy {step} of attempt {attempt}".encode())
    ref = policies.publish_policy(
        store, folder, policies.policy_ref(step, f"{step:032d}", attempt=attempt, final=final)
    )
    kept_policies.prune_policies(store, keep=2)
    return ref

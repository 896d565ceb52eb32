"""The manifests of infra/kubernetes, and docs/operating.md's section on them, without a cluster.

Claims
- every file is YAML or JSON, and every manifest is valid by Kubernetes' schema (kubernetes-validate)
- each kustomization names every file of its folder and nothing else; kubectl renders both, with the user's image
- no file has a secret's value or a registry's address
- every Secret and key that is referred to is one that the docs' commands create; every ConfigMap is one of these files
- no pod runs as root, with capabilities, or on a writable root; each has requests and a limit of memory
- the worker's role has no wildcard, nothing of the cluster's, and the verbs that prefect-kubernetes calls
- a flow run's Job, as prefect-kubernetes makes it, is valid, and has the image, the resources, and secrets by reference

Run: pytest tests/infra/test_kubernetes.py
What needs kubectl, prefect-kubernetes or kubernetes-validate (108 MB, so not in the extra `dev`) is skipped without it:
uv pip install -c infra/constraints.txt prefect-kubernetes kubernetes-validate
"""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "infra" / "kubernetes"
DOCS = (REPOSITORY / "docs" / "operating.md").read_text()
SECTION = DOCS.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
MANIFESTS = [path for path in FILES if path.suffix == ".yaml" and path.name != "kustomization.yaml"]
POOL = json.loads((FOLDER / "pool.json").read_text())

# What prefect-kubernetes 0.7.8 asks of the cluster: its worker creates and deletes Jobs, its observer lists and watches
# Jobs and pods (kopf), and reads logs of pods that crashed.
CALLS = {
    ("batch", "jobs"): {"create", "delete", "list", "watch"},
    ("", "pods"): {"list", "watch"},
    ("", "pods/log"): {"get"},
}
# Prefect's worker refuses a template without these two; Kubernetes has them one level above, and ignores them here.
PREFECTS_OWN = {"parallelism", "completions"}
REGISTRY = re.compile(r"^[^/]+[.:][^/]*/|^localhost/")  # the part before the first slash is a host


def named(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def resources(kind: str | None = None) -> list[dict]:
    found = [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]
    return [each for each in found if kind in (None, each["kind"])]


def pods() -> dict[str, dict]:
    """The specification of each pod, by the name of what makes it."""
    made = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in resources()
        if "template" in each.get("spec", {})
    }
    return made | {"a flow run": POOL["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]}


def containers() -> list[tuple[str, dict]]:
    return [(f"{pod}/{each['name']}", each) for pod, spec in pods().items()
            for each in spec.get("initContainers", []) + spec["containers"]]  # fmt: skip


def values(of, key: str) -> list:
    """Every value of this key, however deep."""
    if isinstance(of, list):
        return [found for each in of for found in values(each, key)]
    if not isinstance(of, dict):
        return []
    return [found for name, each in of.items() for found in ([each] if name == key else []) + values(each, key)]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_is_read(path):
    text = path.read_text()
    if path.suffix == ".json":
        assert json.loads(text)
    else:
        assert path.suffix == ".yaml" and all(isinstance(each, dict) for each in yaml.safe_load_all(text))


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_manifests_are_valid(path):
    validator = pytest.importorskip("kubernetes_validate")
    for each in yaml.safe_load_all(path.read_text()):
        validator.validate(each, validator.latest_version(), strict=True)


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "minio"], ids=["base", "minio"])
def test_the_kustomization_names_every_file(folder):
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    generated = [each.partition("=")[2] for found in values(content, "files") for each in found]
    present = {path.name for path in folder.iterdir() if path.is_file()} - {"kustomization.yaml"}
    assert sorted(content["resources"] + generated) == sorted(present)


@pytest.mark.parametrize("components", [[], ["minio"]], ids=["base", "minio"])
def test_kubectl_renders_them_with_the_users_image(components, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    folder, image = tmp_path / "copy", "registry.example.com:5000/team/tba:1.2"
    shutil.copytree(FOLDER, folder)
    content = yaml.safe_load((folder / "kustomization.yaml").read_text()) | {"components": components}
    content["images"] = [{"name": "tba", "newName": image.rpartition(":")[0], "newTag": "1.2"}, *content["images"][1:]]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert (
        len(rendered) == len(resources()) - (0 if components else 3) + 1
    )  # minio.yaml's three, and the pool's ConfigMap
    assert {each["metadata"].get("namespace", "tba") for each in rendered} == {"tba"}
    ours = [each for each in values(rendered, "image") if "tba" in each]
    assert set(ours) == {image} and len(ours) == 3 + len(components)
    (template,) = [text for each in values(rendered, "template") if isinstance(text := each, str)]
    pool = json.loads(template)
    assert pool["variables"]["properties"]["image"]["default"] == image
    pool["variables"]["properties"]["image"]["default"] = "tba"
    assert pool == POOL  # nothing else was replaced
    (settings,) = [each["data"] for each in rendered if each["metadata"]["name"] == "tba" and "data" in each]
    assert ("AWS_ENDPOINT_URL" in settings) == bool(components)


def test_no_file_has_a_registrys_address():
    for path in FILES:
        for image in re.findall(r"(?:image|newName|\"default\"):\s*\"?([^\s\",}]+)", path.read_text()):
            assert not REGISTRY.search(image), f"{named(path)}: {image}"


def test_registry_addresses_are_recognised():
    assert all(
        REGISTRY.search(image) for image in ("ghcr.io/a/b", "localhost:5000/a", "localhost/a", "registry:5000/a:1")
    )
    assert not any(REGISTRY.search(image) for image in ("postgres:17", "minio/minio:1", "python:3.11-slim"))


def test_no_file_has_a_secret():
    assert resources("Secret") == []
    secret = re.compile(r"PASSWORD|AUTH_STRING$|SECRET_ACCESS|ACCESS_KEY|DATABASE_CONNECTION")
    for name, container in containers():
        for variable in container.get("env", []):
            if secret.search(variable["name"]):
                assert set(variable) == {"name", "valueFrom"}, f"{name}: {variable['name']}"
    for settings in resources("ConfigMap"):
        assert not any(secret.search(key) or "@" in value for key, value in settings["data"].items())


def documented_secrets() -> dict[str, set[str]]:
    """By Secret the keys that the docs' commands give it."""
    commands = re.findall(r"kubectl \S+ \S+ create secret generic ((?:.|\\\n)*?)(?<!\\)\n", SECTION)
    return {command.split()[0]: set(re.findall(r"--from-literal=([\w-]+)=", command)) for command in commands}


def test_the_docs_create_every_secret_that_is_referred_to():
    told, used = documented_secrets(), {}
    for reference in values(list(pods().values()), "secretKeyRef"):
        assert reference["key"] in told.get(reference["name"], ()), reference
        used.setdefault(reference["name"], set()).add(reference["key"])
    for reference in values(list(pods().values()), "secretRef"):
        used.setdefault(reference["name"], set()).update(told[reference["name"]])
    assert used == told, "the docs create a Secret, or a key, that nothing reads"


def test_every_configmap_that_is_referred_to_is_one_of_these():
    made = {each["metadata"]["name"] for each in resources("ConfigMap")} | {"pool"}
    volumes = [each["name"] for each in values(list(pods().values()), "configMap")]
    assert {each["name"] for each in values(list(pods().values()), "configMapRef")} | set(volumes) == made


def test_pods_are_restricted():
    """As the namespace's label demands (Kubernetes' pod security standard `restricted`), and on a read-only root."""
    for name, spec in pods().items():
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        has_token = spec.get("automountServiceAccountToken", True)
        assert has_token == (name == "prefect-worker"), name
        assert spec.get("enableServiceLinks") is False or name == "postgres", name
    for name, container in containers():
        context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
        assert container["securityContext"] == context, name
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"], name
        assert container["resources"]["requests"]["cpu"], name


def test_services_have_probes():
    probed = {name: set(each) & {"startupProbe", "readinessProbe", "livenessProbe"} for name, each in containers()}
    both = {"readinessProbe", "livenessProbe"}
    assert probed["postgres/postgres"] >= both and probed["prefect-server/server"] >= both
    assert probed["minio/minio"] >= both and "livenessProbe" in probed["prefect-worker/worker"]


def test_the_role_is_what_prefect_calls():
    (role,), (binding,) = resources("Role"), resources("RoleBinding")
    assert resources("ClusterRole") == resources("ClusterRoleBinding") == []
    assert "*" not in json.dumps(role)
    allowed = {(group, resource): set(rule["verbs"]) for rule in role["rules"] for group in rule["apiGroups"]
               for resource in rule["resources"]}  # fmt: skip
    assert allowed == CALLS
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (account,) = resources("ServiceAccount")
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    assert pods()["prefect-worker"]["serviceAccountName"] == account["metadata"]["name"]


@pytest.fixture
def make_job(monkeypatch):
    """Makes a flow run's Job with variables, by a worker with worker.yaml's environment: (manifest, namespace)."""
    module = pytest.importorskip("prefect_kubernetes.worker")
    from prefect.client.schemas.objects import FlowRun
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    created = {}

    class Cluster:
        def __init__(self, client):
            pass

        async def create_namespaced_job(self, namespace, manifest):
            created.update(namespace=namespace, manifest=manifest)

    monkeypatch.setattr(module, "BatchV1Api", Cluster)
    for variable in next(each for name, each in containers() if name == "prefect-worker/worker")["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])

    async def make(variables: dict) -> None:
        found = await module.KubernetesWorkerJobConfiguration.from_template_and_values(POOL, variables, client=object())
        found.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="blue-whale"))
        worker = module.KubernetesWorker.__new__(module.KubernetesWorker)
        worker._logger = None  # it would warn of a string in the manifest
        await worker._create_job(found, None)

    def made(**variables):
        with temporary_settings({PREFECT_API_URL: "http://server/api", PREFECT_API_AUTH_STRING: "name:hidden"}):
            asyncio.run(make(variables))
        return created["manifest"], created["namespace"]

    return made


def test_a_flow_runs_job_is_valid(make_job):
    validator = pytest.importorskip("kubernetes_validate")
    job, namespace = make_job()
    spec = job["spec"]["template"]["spec"]
    assert all(spec.pop(key) == 1 for key in PREFECTS_OWN)
    validator.validate(job, validator.latest_version(), strict=True)
    assert namespace == job["metadata"]["namespace"] == "tba"
    assert job["spec"]["backoffLimit"] == 0 and spec["restartPolicy"] == "Never"
    assert spec["containers"][0]["args"] == ["prefect", "flow-run", "execute"]
    assert job["metadata"]["generateName"] == "blue-whale-"


def test_prefects_own_fields_are_needed():
    """The only two of the template that Kubernetes does not have."""
    worker = pytest.importorskip("prefect_kubernetes.worker")
    without = json.loads(json.dumps(POOL))
    for key in PREFECTS_OWN:
        del without["job_configuration"]["job_manifest"]["spec"]["template"]["spec"][key]
    client = object()  # else a server is started, for blocks that the template does not name
    with pytest.raises(ValueError, match="missing required attributes"):
        asyncio.run(worker.KubernetesWorkerJobConfiguration.from_template_and_values(without, {}, client=client))


def test_a_flow_runs_job_has_its_environment_by_reference(make_job):
    job, _ = make_job(env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert "hidden" not in json.dumps(job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each for each in container["env"]}
    assert len(env) == len(container["env"]), "a variable twice"
    assert env["PREFECT_API_AUTH_STRING"]["valueFrom"] == {"secretKeyRef": {"name": "prefect", "key": "auth-string"}}
    assert env["VLLM_CPU_KVCACHE_SPACE"]["value"] == "2"
    assert env["PREFECT__FLOW_RUN_ID"]["value"] and env["HOME"]["value"] == "/tmp"
    assert container["envFrom"] == [{"configMapRef": {"name": "tba"}}, {"secretRef": {"name": "tba-store"}}]
    (settings,) = resources("ConfigMap")
    assert {"PREFECT_API_URL", "TBA_STORE"} <= set(settings["data"])


def test_a_flow_runs_job_has_its_image_and_resources(make_job):
    from prefect.utilities.schema_tools.validation import validate

    (container,) = make_job()[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == POOL["variables"]["properties"]["image"]["default"] == "tba"
    asked = {"image": "other:2", "cpu": 16, "memory": "64Gi", "gpus": 2, "disk": "100Gi"}
    validate(asked, POOL["variables"], raise_on_error=True)  # as Prefect's server does
    (container,) = make_job(**asked)[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "other:2"
    wanted = {"cpu": 16, "memory": "64Gi", "ephemeral-storage": "100Gi", "nvidia.com/gpu": 2}
    assert container["resources"] == {"requests": wanted, "limits": wanted}


def test_the_deployments_fit_the_pool():
    """No deployment sets what a pool of this type does not know, and each is imported from the installed package."""
    settings = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    assert settings["pull"] == [{"infra.pull_step.enter_workers_folder": {}}]
    for deployment in settings["deployments"]:
        assert deployment["work_pool"]["name"] == "tba" and "/" not in deployment["entrypoint"]
        assert set(deployment["work_pool"].get("job_variables", {})) <= set(POOL["variables"]["properties"])
    image = (REPOSITORY / "infra" / "container" / "Containerfile").read_text()
    assert "\nWORKDIR /work\nCOPY prefect.yaml ./\n" in image and "--extra kubernetes" in image
    assert pods()["a flow run"]["containers"][0]["workingDir"] == "/work"

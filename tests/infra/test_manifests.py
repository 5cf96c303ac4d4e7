"""The manifests say what is true of the code: ports, paths, options, versions, metrics and commands."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from infra_parts import ALERTS, ROOT, queries
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT, DEFAULT_DASHBOARD_PORT
from ray.dashboard import http_server_agent, http_server_head
from ray.serve.schema import ServeDeploySchema

from ragspec.cli.app import app as ragspec
from services.backend import ENGINE_GAUGES
from services.metrics import Metrics
from services.serving import ServeArgs, build_app, settings_of
from services.settings import DEFAULT_PORT, ServiceSettings

INFRA = ROOT / "infra"
KUBERAY = INFRA / "kuberay"
MANIFESTS = {
    path.stem if number == 0 else f"{path.stem}-{number}": document
    for path in sorted(KUBERAY.glob("*.yaml"))
    for number, document in enumerate(yaml.safe_load_all(path.read_text(encoding="utf-8")))
}
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text(encoding="utf-8"))
PAGES = [INFRA / "README.md", INFRA / "RUNBOOK.md", KUBERAY / "README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GRACE_S = 10.0


def walk(tree: Any) -> Iterator[Any]:
    """Every mapping of a document."""
    if isinstance(tree, dict):
        yield tree
        yield from (found for value in tree.values() for found in walk(value))
    elif isinstance(tree, list):
        yield from (found for value in tree for found in walk(value))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Specifications of pods by the manifest's name."""
    for name, manifest in MANIFESTS.items():
        yield from ((name, found) for found in walk(manifest) if "containers" in found)


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def unknown_parts(words: list[str]) -> list[str]:
    """Of a call of `ragspec`, the commands and options that there are not."""
    command: Any = typer.main.get_command(ragspec)
    for position, word in enumerate(words):
        if not hasattr(command, "commands"):
            break
        if word.startswith("-"):
            return [each for each in words[position:] if each not in options_of(command)]
        if word not in command.commands:
            return [word]
        command = command.commands[word]
    if command.context_settings.get("ignore_unknown_options"):  # a job's own options
        return []
    given = (word.partition("=")[0] for word in words)
    options = (word for word in given if re.fullmatch(r"--?[a-z][a-z-]*", word))
    return [option for option in options if option not in options_of(command) | {"--help"}]


def test_the_service_of_kuberay_is_one_that_serve_and_the_service_start() -> None:
    """Bug guarded: an option that there is not, found when the cluster has been made."""
    spec = MANIFESTS["rayservice"]["spec"]
    given = yaml.safe_load(spec["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(given).applications
    settings = settings_of(ServeArgs.model_validate(application.args)).service
    build_app(application.args)
    assert settings.host == given["http_options"]["host"] and not settings.is_local
    (worker,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert worker["template"]["spec"]["terminationGracePeriodSeconds"] >= settings.drain_s + GRACE_S
    mounted = {each["mountPath"] for each in worker["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert {"/data", "/keys"} <= mounted
    assert settings.keys_file.startswith("/keys/") and settings.data_dir.startswith("/data/")


def test_ports_and_probes_are_those_of_ray_and_serve() -> None:
    """Bug guarded: a probe of an address that answers 401 or nothing restarts every pod for ever."""
    listened = {8000: "/-/healthz", DEFAULT_DASHBOARD_PORT: "/api/gcs_healthz"}
    listened[DEFAULT_DASHBOARD_AGENT_LISTEN_PORT] = "/api/local_raylet_healthz"
    probes = [
        probe for manifest in MANIFESTS.values() for mapping in walk(manifest) if (probe := mapping.get("httpGet"))
    ]
    assert probes and all(listened[probe["port"]] == probe["path"] for probe in probes)
    public = "".join(Path(str(module.__file__)).read_text() for module in (http_server_head, http_server_agent))
    assert all(f'"{path}"' in public for path in listened.values() if path.startswith("/api"))
    opened = {
        port["containerPort"] for _, pod in pods() for each in pod["containers"] for port in each.get("ports", ())
    }
    allowed = {port["port"] for rule in MANIFESTS["network"]["spec"]["ingress"] for port in rule.get("ports", ())}
    assert allowed == {DEFAULT_PORT, DEFAULT_DASHBOARD_PORT} <= opened


@pytest.mark.parametrize("name", ["raycluster", "rayservice", "rayjob"])
def test_pods_are_confined_and_have_resources_probes_and_the_token(name: str) -> None:
    """Bug guarded: a container that runs as root, takes a whole node, or joins without a token."""
    for pod in (pod for where, pod in pods() if where == name):
        assert pod["securityContext"]["runAsNonRoot"] and "automountServiceAccountToken" in pod
        for container in pod["containers"]:
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            variables = {each["name"]: each for each in container["env"]}
            assert variables["RAY_AUTH_MODE"]["value"] == "token" and "valueFrom" in variables["RAY_AUTH_TOKEN"]
            if name != "rayjob":
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_the_operator_and_the_autoscaler_have_the_token() -> None:
    """Bug guarded: Ray answers the operator with 401, so no service is ever ready; the autoscaler waits for the head for ever."""
    service, cluster = MANIFESTS["rayservice"]["spec"]["rayClusterConfig"], MANIFESTS["raycluster"]["spec"]
    for spec in (service, cluster):
        references = [each["secretKeyRef"] for each in walk(spec) if "secretKeyRef" in each]
        assert {each["name"] for each in references} == {spec["authOptions"]["secretName"]}
        assert spec["authOptions"]["mode"] == "token" and {each["key"] for each in references} == {"auth_token"}
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all(0 < group["minReplicas"] < group["maxReplicas"] for group in cluster["workerGroupSpecs"])


def test_one_process_writes_the_service_s_files() -> None:
    """Bug guarded: a second cluster, started beside the first for a new image, writes to the same SQLite files."""
    spec = MANIFESTS["rayservice"]["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert spec["upgradeStrategy"] == {"type": "None"}
    assert application["args"]["deployment_config"]["num_replicas"] == group["replicas"] == group["maxReplicas"] == 1
    (claim,) = {each["claimName"] for each in walk(spec) if "claimName" in each}
    claims = {each["metadata"]["name"]: each for each in MANIFESTS.values() if each["kind"] == "PersistentVolumeClaim"}
    assert claims[claim]["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_job_on_a_shared_cluster_is_not_repeated_by_the_operator() -> None:
    """Bug guarded: KubeRay refuses a job with both, or deletes the shared cluster to try again."""
    job = MANIFESTS["rayjob"]
    assert "clusterSelector" in job["spec"] and "backoffLimit" not in job["spec"]
    assert "generateName" in job["metadata"]


def test_secrets_and_volumes_that_are_named_are_made_somewhere() -> None:
    """Bug guarded: a pod that waits for ever for a secret that no page says how to make."""
    made = set(re.findall(r"create secret generic (\S+)", (KUBERAY / "README.md").read_text()))
    made |= {manifest["metadata"].get("name") for manifest in MANIFESTS.values()}
    mappings = [mapping for manifest in MANIFESTS.values() for mapping in walk(manifest)]
    named = {mapping["secretKeyRef"]["name"] for mapping in mappings if "secretKeyRef" in mapping}
    named |= {mapping[key] for mapping in mappings for key in ("secretName", "claimName") if key in mapping}
    named |= {mapping["ray.io/cluster"] for mapping in mappings if "ray.io/cluster" in mapping}
    assert {"ragspec-ray", "ragspec-keys", "ragspec-data", "ragspec-service", "ragspec"} == named <= made


def test_versions_are_the_project_s_and_the_lock_file_s() -> None:
    """Bug guarded: an operator that starts another Ray than the image has."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (INFRA / "image/cpu.txt").read_text(), re.MULTILINE))
    mappings = [mapping for manifest in MANIFESTS.values() for mapping in walk(manifest)]
    assert {mapping["rayVersion"] for mapping in mappings if "rayVersion" in mapping} == {locked["ray"]}
    images = {mapping["image"] for mapping in mappings if "image" in mapping}
    assert images == {COMPOSE["services"]["ragspec"]["image"]} == {f"ragspec:{PROJECT['version']}-cpu"}


def test_the_job_and_compose_name_options_that_exist() -> None:
    """Bug guarded: a job that ends with "no such option" on a cluster that was paid for."""
    python, flag, module, *words = shlex.split(MANIFESTS["rayjob"]["spec"]["entrypoint"])
    assert (python, flag) == ("python", "-m")
    known = options_of(typer.main.get_command(importlib.import_module(module).app))
    assert {word for word in words if word.startswith("--")} <= known
    name, *words = COMPOSE["services"]["ragspec"]["command"]
    assert name == "ragspec" and not unknown_parts(words)
    assert words[words.index("--port") + 1] == str(DEFAULT_PORT)


def test_compose_and_prometheus_name_the_same_addresses() -> None:
    """Bug guarded: three programs that run and do not find each other."""
    services = COMPOSE["services"]
    (job,) = yaml.safe_load((INFRA / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"ragspec:{DEFAULT_PORT}"]
    (source,) = yaml.safe_load((INFRA / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    for service in services.values():
        for volume in service.get("volumes", ()):
            source_path = volume.partition(":")[0]
            assert not source_path.startswith("./") or (INFRA / source_path).exists(), volume
    grace_s = float(services["ragspec"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= ServiceSettings().drain_s + GRACE_S


def test_metrics_of_alerts_and_panels_are_exposed() -> None:
    """Bug guarded: a renamed metric; the dashboard's test against a real Prometheus is a slow one."""
    watched = re.findall(r'watch\(\s*"([\w:]+)"', (ROOT / "services/backend.py").read_text())
    watched += [name for name, *_ in ENGINE_GAUGES]
    exposed = set(re.findall(r"^# TYPE (\S+)", Metrics("m").text().decode(), re.MULTILINE)) | set(watched)
    texts = [*queries().values(), *(rule["expr"] for rule in ALERTS), (INFRA / "RUNBOOK.md").read_text()]
    named = {name for text in texts for name in re.findall(r"(?:vllm:|\bragspec_|\bprocess_)\w+", text)}
    series = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert not {name for name in series if not {name, f"{name}_total"} & exposed}


def test_every_alert_has_its_section_in_the_runbook() -> None:
    """Bug guarded: a link of an alert, at night, that leads nowhere."""
    sections = {
        f"RUNBOOK.md#{name.lower()}"
        for name in re.findall(r"^## (\w+)$", (INFRA / "RUNBOOK.md").read_text(), re.MULTILINE)
    }
    assert {rule["annotations"]["runbook"] for rule in ALERTS} <= sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_exist(page: Path) -> None:
    """Bug guarded: a command of the runbook that was renamed, found in the middle of a fault."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`(ragspec [^`]+)`", page.read_text())
    calls = [line.partition("#")[0] for block in blocks for line in block.splitlines()] + inline
    calls = [re.split(r"[|>]", call)[0].strip() for call in calls if call.startswith("ragspec ")]
    assert calls and not {call: unknown for call in calls if (unknown := unknown_parts(shlex.split(call)[1:]))}


DEFINITION = Path(__file__).with_name("rayjob_definition.yaml")


def validated(crds: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, KUBERAY / "validate.py", "--crds", crds, *files]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_the_validator_accepts_what_fits_and_refuses_what_does_not(tmp_path: Path) -> None:
    """Bug guarded: a check of manifests that cannot fail."""
    shutil.copy(DEFINITION, tmp_path / "crd.yaml")
    done = validated(tmp_path, KUBERAY / "rayjob.yaml")
    assert done.returncode == 0 and "1 files, 0 faults" in done.stdout, done.stdout
    for change in (("clusterSelector", "clusterSelectors"), ("86400", "soon"), ("entrypoint: >-", "clusterName: >-")):
        (tmp_path / "job").write_text((KUBERAY / "rayjob.yaml").read_text().replace(*change))
        assert validated(tmp_path, tmp_path / "job").returncode == 1, change
    assert "no definition of v1 PersistentVolumeClaim" in validated(tmp_path).stdout
    (tmp_path / "crd.yaml").write_text("kind: ConfigMap")
    assert validated(tmp_path).returncode == 2


def test_the_manifests_fit_kuberay_s_definitions() -> None:
    """Bug guarded: a field that KubeRay does not know, which the server refuses or, worse, drops."""
    folder = os.environ.get("RAGSPEC_CRDS", "")
    if not folder:
        pytest.skip("RAGSPEC_CRDS names no folder of KubeRay's definitions")
    done = validated(Path(folder))
    assert done.returncode == 0, done.stdout

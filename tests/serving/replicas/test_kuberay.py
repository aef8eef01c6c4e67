"""The example for Kubernetes fits KubeRay's schema, Ray Serve's, and what this version of fastgen prints."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from fastgen.serving.http.app import create_app
from fastgen.serving.options import ServeOptions
from fastgen.serving.replicas import cluster
from fastgen.serving.replicas.deploy_file import deploy_file
from fastgen.serving.service import Service
from tests.serving.test_page import answer

ROOT = Path(__file__).resolve().parents[3]
# Written after the definition of the resource in KubeRay 1.7.0, with the fields that the example uses. Fields that it
# does not name are errors here, as they are for `kubectl apply`.
SCHEMA = json.loads(Path(__file__).with_name("rayservice.schema.json").read_text())
SERVICE, ADDRESS = yaml.safe_load_all((ROOT / "docs" / "examples" / "kuberay.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
CONFIG = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
ARGUMENTS = CONFIG["applications"][0]["args"]


def test_kuberay_takes_it() -> None:
    jsonschema.validate(SERVICE, SCHEMA)


@pytest.mark.parametrize("field", ["replica", "template"])
def test_the_schema_finds_mistakes(field: str) -> None:
    broken = json.loads(json.dumps(SERVICE))
    group = broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group[field] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_ray_serve_takes_what_it_deploys() -> None:
    ServeDeploySchema.model_validate(CONFIG)


def test_it_deploys_what_print_config_writes() -> None:
    given: dict[str, Any] = {name: value for name, value in ARGUMENTS.items() if name != "wait_for_machines_s"}
    printed = yaml.safe_load(deploy_file(given))
    printed["applications"][0]["args"]["wait_for_machines_s"] = ARGUMENTS["wait_for_machines_s"]
    assert printed == CONFIG


def test_its_release_of_ray_is_the_one_that_is_needed() -> None:
    assert CLUSTER["rayVersion"].startswith(f"{cluster._RAY}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"ray[serve]>={cluster._RAY},<2.61" in project["project"]["optional-dependencies"]["ray"]


def test_there_is_a_worker_with_a_gpu_for_each_replica() -> None:
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == ARGUMENTS["replicas"]
    (container,) = WORKERS["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    deployment = CONFIG["applications"][0]["deployments"][0]
    grace_s = WORKERS["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > deployment["graceful_shutdown_timeout_s"]


def test_clients_reach_the_head_while_it_is_ready() -> None:
    (container,) = HEAD["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["serve"] == ServeOptions().port == ADDRESS["spec"]["ports"][0]["targetPort"]
    assert ARGUMENTS["host"] == "0.0.0.0"
    selector = ADDRESS["spec"]["selector"]
    assert selector.pop("app.kubernetes.io/name") == HEAD["metadata"]["labels"]["app.kubernetes.io/name"]
    assert selector == {"ray.io/node-type": "head", "ray.io/serve": "true"}
    service = Service({"model": "tiny-llama"})  # it is never started
    app = create_app(service, ServeOptions())
    asked = asyncio.run(answer(app, "/-/healthz"))
    asyncio.run(service.stop())
    assert asked == (503, b"starting"), "KubeRay sets the label ray.io/serve by it"


def test_keys_and_weights_are_mounted_where_the_arguments_say() -> None:
    (container,) = HEAD["spec"]["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert ARGUMENTS["api_key_file"].rpartition("/")[0] in mounts
    assert ARGUMENTS["model"].rpartition("/")[0] in mounts
    assert HEAD["spec"]["volumes"][0]["secret"]["secretName"] == "fastgen-api-keys"

"""gRPC from outside: by a stub that protoc generates from the shipped file, by reflection, by the standard services."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.grpc import messages
from tests.serving.live_views import is_idle, live_views

LONG = 1900  # so many tokens that they take far longer than any deadline here
WAIT_S = 60.0


@pytest.fixture(scope="module")
def channel(deployment: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(str(deployment.grpc_address)) as opened:
        yield opened


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns the modules that protoc generates from the shipped file: messages as ``.pb``, the stub as ``.rpc``."""
    folder = tmp_path_factory.mktemp("generated")
    source = messages.PROTOSET.with_name("fastgen.proto")
    (folder / "from_proto.proto").write_text(source.read_text())
    arguments = [f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", "from_proto.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))

        class Generated:
            pb = importlib.import_module("from_proto_pb2")
            rpc = importlib.import_module("from_proto_pb2_grpc")

        yield Generated
        for name in ("from_proto_pb2", "from_proto_pb2_grpc"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def stub(generated: Any, channel: grpc.Channel) -> Any:
    return generated.rpc.GenerationStub(channel)


def live(deployment: Deployment) -> list[dict[str, Any]]:
    """Returns the present state of each engine."""
    return list(live_views(deployment.address).values())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.01)


def test_a_stub_of_the_shipped_file_generates(generated: Any, stub: Any) -> None:
    pb = generated.pb
    sampling = pb.SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    response = stub.Generate(pb.GenerateRequest(text="Once upon a time", sampling=sampling))
    (completion,) = response.completions
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert completion.metrics.ttft_s > 0
    chunks = list(stub.GenerateStream(pb.GenerateRequest(text="Once upon a time", sampling=sampling)))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == completion.text == chunks[-1].response.completions[0].text
    assert [chunk.HasField("response") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    by_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=response.prompt_token_ids), sampling=sampling)
    assert stub.Generate(by_ids).completions[0].text == completion.text


def test_reflection_tells_enough_to_call(channel: grpc.Channel) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest

    def ask(one: Any) -> Any:
        (answer,) = reflection.ServerReflectionInfo(iter([one]))
        return answer

    services = {service.name for service in ask(request(list_services="")).list_services_response.service}
    assert services == {messages.SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    pool = descriptor_pool.DescriptorPool()
    for service in services:
        for file in ask(request(file_containing_symbol=service)).file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    method = pool.FindServiceByName(messages.SERVICE).FindMethodByName("ModelInfo")
    make, read = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
    call = channel.unary_unary(f"/{messages.SERVICE}/ModelInfo", make.SerializeToString, read.FromString)
    assert call(make()).model == "tiny-llama"


def test_the_health_service_tells_the_state(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", messages.SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    watching = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "a", "sampling": {"temperature": -1.0}}, "temperature must be"),
        ({"text": "a", "sampling": {"max_new_tokens": 0}}, "max_new_tokens must be"),
        ({"text": "a", "sampling": {"max_new_tokens": 10**6}}, "max_model_len is"),
        ({"text": "a", "sampling": {"early_stopping": 7}}, "early_stopping must be"),
        ({"text": "a", "sampling": {"response_format": {}}}, "response_format: one of its kinds"),
        ({"text": "a", "sampling": {"response_format": {"json_schema": "{"}}}, "response_format"),
        ({"token_ids": {"ids": [10**6]}}, "1000000"),
        ({}, "prompt: text or token_ids must be set"),
    ],
)
def test_what_is_wrong_is_named(generated: Any, stub: Any, fields: dict[str, Any], said: str) -> None:
    request = generated.pb.GenerateRequest(**fields)
    for call in (lambda: stub.Generate(request), lambda: list(stub.GenerateStream(request))):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert said in refused.value.details()


def test_a_conversation_that_the_template_refuses_is_refused(generated: Any, stub: Any) -> None:
    pb = generated.pb
    for message in (pb.Message(role="user", content="a", more="[]"), pb.Message(role="user", content="a", more="{")):
        with pytest.raises(grpc.RpcError) as refused:
            stub.Chat(pb.ChatRequest(messages=[message]))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "message 0: more" in refused.value.details()


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_cancels_leaves_nothing_behind(generated: Any, stub: Any, deployment: Deployment, is_stream: bool) -> None:
    pb = generated.pb
    sampling = pb.SamplingParams(max_new_tokens=LONG, temperature=0, ignore_eos=True, n=4)
    request = pb.GenerateRequest(text="Once upon a time", sampling=sampling)
    if is_stream:
        call = stub.GenerateStream(request)
        next(call)
    else:
        call = stub.Generate.future(request)
    wait_for(lambda: any(engine["num_running"] > 0 for engine in live(deployment)))
    call.cancel()
    wait_for(lambda: all(map(is_idle, live(deployment))))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_ends_the_request_in_the_engine(
    generated: Any, stub: Any, deployment: Deployment, is_stream: bool
) -> None:
    pb = generated.pb
    sampling = pb.SamplingParams(max_new_tokens=LONG, temperature=0, ignore_eos=True, n=16)
    request = pb.GenerateRequest(text="Once upon a time", sampling=sampling)
    with pytest.raises(grpc.RpcError) as late:
        list(stub.GenerateStream(request, timeout=0.3)) if is_stream else stub.Generate(request, timeout=0.3)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: all(map(is_idle, live(deployment))))


def test_only_who_has_the_token_ends_the_server(generated: Any, stub: Any, deployment: Deployment) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", deployment.token),)):
        with pytest.raises(grpc.RpcError) as refused:
            stub.Terminate(generated.pb.TerminateRequest(), metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert stub.ModelInfo(generated.pb.ModelInfoRequest()).state == "ready"

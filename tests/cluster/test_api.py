"""The committed code is what the .proto says, and the interface stays compatible."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from cluster.api import dspark_v1_pb2 as pb
from tests.conftest import REPO

PROTO = "cluster/api/dspark_v1.proto"


def test_regenerating_gives_the_committed_api(tmp_path: Path) -> None:
    """Compared as descriptors: the text of generated code varies with the tool's version."""
    out = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={out}"]
    subprocess.run([*command, PROTO], cwd=REPO, check=True, capture_output=True)
    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):
        _drop_json_names(file.message_type)
    assert committed == fresh


def _drop_json_names(messages: Iterable[DescriptorProto]) -> None:
    """protoc fills them in, the runtime does not."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _drop_json_names(message.nested_type)


@pytest.mark.parametrize(
    ("message", "optional"),
    [
        (pb.GenerateRequest, {"max_tokens", "draft", "deadline_s", "target_tokens_per_s"}),
        (
            pb.Sampling,
            {
                "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                "presence_penalty", "frequency_penalty", "seed",
            },
        ),
    ],
)  # fmt: skip
def test_absence_is_told_from_zero_where_it_matters(
    message: type[pb.GenerateRequest | pb.Sampling], optional: set[str]
) -> None:
    found = {
        field.name
        for field in message.DESCRIPTOR.fields
        if field.has_presence
        and field.message_type is None
        and (field.containing_oneof is None or field.containing_oneof.name.startswith("_"))
    }
    assert found == optional


def test_field_numbers_do_not_move() -> None:
    numbers = {field.name: field.number for field in pb.GenerateResponse.DESCRIPTOR.fields}
    assert numbers == {
        "request_id": 1, "text": 2, "token_ids": 3, "logprobs": 4, "finish_reason": 5, "usage": 6,
    }  # fmt: skip

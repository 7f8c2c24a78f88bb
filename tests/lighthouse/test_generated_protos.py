"""The committed protobuf code is what protos/ says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "torchft/lighthouse.proto": "lighthouse.pb.torchft_pb2",
    "torchft_plus/v1/lighthouse.proto": "lighthouse.pb.lighthouse_pb2",
    "torchft_plus/v1/peer.proto": "torchft_plus.pb.peer_pb2",
}
PROTOS = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))

pytest.importorskip("grpc_tools", reason="needs grpcio-tools (extra dev)")


def clear_json_names(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        clear_json_names(nested)


@pytest.mark.parametrize("proto", PROTOS)
def test_the_committed_messages_are_those_of_the_proto_file(proto: str, tmp_path: Path) -> None:
    """Compares meaning and not text, so that another release of grpcio-tools proves the same."""
    from grpc_tools import protoc

    out = tmp_path / "set"
    common = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{common}", f"--descriptor_set_out={out}", proto]
    assert protoc.main(arguments) == 0
    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    importlib.import_module(MODULES[proto]).DESCRIPTOR.CopyToProto(committed)
    fresh.ClearField("name")
    committed.ClearField("name")
    for message in [*fresh.message_type, *committed.message_type]:
        clear_json_names(message)
    assert committed == fresh, "run scripts/protos"


def release(code: str) -> str:
    return code.partition("# Protobuf Python Version: ")[2].partition("\n")[0]


def test_the_script_makes_the_committed_files(tmp_path: Path) -> None:
    """All of them and nothing else; to the letter where both come from the same release of protoc."""
    command = [sys.executable, str(ROOT / "scripts" / "protos"), "--into", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    expected = {MODULES[proto].replace(".", "/") + ending for proto in PROTOS for ending in (".py", ".pyi")}
    assert made == expected
    for path in sorted(made):
        fresh, committed = (tmp_path / path).read_text(), (ROOT / path).read_text()
        versions = [release((root / path).with_suffix(".py").read_text()) for root in (tmp_path, ROOT)]
        if versions[0] == versions[1]:
            assert committed == fresh, f"{path} is stale: run scripts/protos"

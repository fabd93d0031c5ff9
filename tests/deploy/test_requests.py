"""Ingress without Ray: mapping, tokens, text side."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from cluster.api import dspark_v1_pb2 as pb
from cluster.config import RouterConfig
from cluster.errors import (
    AuthError,
    BadConstraint,
    BadSamplingParameter,
    CheckpointError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    Unsupported,
)
from deploy.requests import build_request, build_response, check_call
from deploy.service import failure, require_free
from deploy.text_model import TextModel, load_text_model
from router.request import Delta, GenerateRequest, Usage

CONVERSATIONS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Hé 🎈"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  trailing space "},
    ],
]


@pytest.fixture(scope="module")
def text_model(smollm2_dir: Path) -> TextModel:
    return load_text_model(smollm2_dir)


def build(message: pb.GenerateRequest, text_model: TextModel) -> GenerateRequest:
    return build_request(message, text_model, RouterConfig(default_max_tokens=77), "new")


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_text_and_chat_give_the_ids_that_transformers_gives(
    text_model: TextModel, smollm2_dir: Path, messages: list[dict[str, str]]
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = reference(text, add_special_tokens=False).input_ids
    assert list(text_model.encode_chat(messages)) == expected
    plain = messages[-1]["content"]
    assert list(text_model.encode(plain)) == reference(plain).input_ids
    assert text_model.eos_ids == (reference.eos_token_id,)


@pytest.mark.model
def test_what_is_absent_takes_its_default(text_model: TextModel) -> None:
    request = build(pb.GenerateRequest(text="Hi"), text_model)
    assert (request.request_id, request.max_new_tokens, request.draft) == ("new", 77, True)
    assert request.deadline_s is None
    assert (request.target_rate, request.tier) == (0.0, "")
    assert (request.constraint_kind, request.constraint, request.adapter) == ("", "", "")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.0, 1.0, 1.0)
    assert sampling.mode == "coupled"
    other = build(pb.GenerateRequest(text="Hi"), text_model)
    assert other.sampling.seed != sampling.seed  # drawn anew


@pytest.mark.model
def test_what_is_given_arrives(text_model: TextModel) -> None:
    message = pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[5, 6]),
        max_tokens=3,
        stop=["a"],
        stop_token_ids=[9],
        ignore_eos=True,
        draft=False,
        deadline_s=1.5,
        target_tokens_per_s=12.5,
        tier="batch",
        constraint=pb.Constraint(regex="[a-z]+é"),
        adapter="sql",
        sampling=pb.Sampling(
            temperature=0.5,
            top_k=4,
            top_p=0.0,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={8: 2.0, 3: -1.0},
            seed=0,
            mode=pb.MODE_REJECTION,
            logprobs=True,
        ),
    )
    request = build(message, text_model)
    assert (request.request_id, request.ids, request.max_new_tokens) == ("r", (5, 6), 3)
    assert (request.stop_strings, request.stop_ids) == (("a",), (9,))
    assert (request.ignore_eos, request.draft, request.deadline_s) == (True, False, 1.5)
    assert (request.target_rate, request.tier) == (12.5, "batch")
    assert (request.constraint_kind, request.constraint) == ("regex", "[a-z]+é")
    assert request.adapter == "sql"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert sampling.bias_ids.tolist() == [3, 8]
    assert sampling.bias_values.tolist() == [-1.0, 2.0]
    assert (sampling.seed, sampling.mode, sampling.logprobs) == (0, "rejection", True)


@pytest.mark.model
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.GenerateRequest(), InvalidRequest),
        (pb.GenerateRequest(chat=pb.Chat()), InvalidRequest),
        (pb.GenerateRequest(text="x", request_id="x" * 129), InvalidRequest),
        (pb.GenerateRequest(text="x", target_tokens_per_s=0.0), InvalidRequest),
        (pb.GenerateRequest(text="x", target_tokens_per_s=float("nan")), InvalidRequest),
        (pb.GenerateRequest(text="x", constraint=pb.Constraint()), BadConstraint),
        (pb.GenerateRequest(text="x", constraint={"json_object": False}), BadConstraint),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_k=-1)), BadSamplingParameter),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(mode=7)), Unsupported),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_request_is_refused(
    text_model: TextModel, message: pb.GenerateRequest, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        build(message, text_model)


@pytest.mark.model
@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (pb.Constraint(json_schema='{"z": 1, "a": 2}'), "json_schema", '{"z": 1, "a": 2}'),
        (pb.Constraint(json_object=True), "json_object", ""),
        (pb.Constraint(regex=""), "regex", ""),
        (pb.Constraint(choice=pb.Choices(texts=["né", '"'])), "choice", '["né", "\\""]'),
        (pb.Constraint(choice=pb.Choices()), "choice", "[]"),
        (pb.Constraint(grammar="root ::= x"), "grammar", "root ::= x"),
    ],
)
def test_every_constraint_arrives_as_kind_and_text(
    text_model: TextModel, given: pb.Constraint, kind: str, text: str
) -> None:
    """Empty ones too, for admission to refuse."""
    request = build(pb.GenerateRequest(text="Hi", constraint=given), text_model)
    assert (request.constraint_kind, request.constraint) == (kind, text)


@pytest.mark.model
def test_usage_goes_with_the_last_message_only(text_model: TextModel) -> None:
    request = build(pb.GenerateRequest(text="Hi", sampling=pb.Sampling(seed=4)), text_model)
    middle = build_response(request, Delta(text="a", token_ids=(1,)), ttft_s=0.1, total_s=0.2)
    assert not middle.HasField("usage")
    usage = Usage(
        num_prompt_tokens=1,
        num_completion_tokens=2,
        num_rounds=3,
        num_proposed=4,
        num_verified=5,
        num_accepted=6,
    )
    last = build_response(
        request, Delta(finish_reason="stop", usage=usage), ttft_s=0.1, total_s=0.2
    ).usage
    counts = (last.prompt_tokens, last.completion_tokens, last.rounds)
    assert counts == (1, 2, 3)
    assert (last.proposed, last.verified, last.accepted) == (4, 5, 6)
    assert (last.ttft_s, last.total_s, last.seed) == (0.1, 0.2, 4)


def test_tokens() -> None:
    check_call([], token="", application="a")
    check_call([("authorization", "Bearer sé")], token="sé", application="a")
    for metadata in ([], [("authorization", "se")], [("authorization", "Bearer x")]):
        with pytest.raises(AuthError):
            check_call(metadata, token="sé", application="a")


def test_a_call_for_another_application_names_the_one_there_is() -> None:
    check_call([("application", "dspark")], token="", application="dspark")
    with pytest.raises(ModelNotFound, match="'nope'") as caught:
        check_call([("application", "nope")], token="", application="dspark")
    assert caught.value.hint == "there is dspark"
    with pytest.raises(AuthError):  # a stranger learns nothing
        check_call([("application", "nope")], token="secret", application="dspark")


@pytest.fixture
def bare_model(smollm2_dir: Path, tmp_path: Path) -> Path:
    """A text side without a chat template, with several end tokens."""
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    config = {"vocab_size": 10, "max_position_embeddings": 20, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.model
def test_a_model_without_template_takes_no_chat(bare_model: Path) -> None:
    text_model = load_text_model(bare_model)
    assert text_model.eos_ids == (2, 3)
    assert (text_model.vocab_size, text_model.max_positions) == (10, 20)
    with pytest.raises(Unsupported, match="chat template"):
        text_model.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.model
def test_a_template_may_refuse_and_may_be_a_list(bare_model: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ raise_exception('no system role') }}"},
        {"name": "tools", "template": "x"},
    ]
    (bare_model / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    text_model = load_text_model(bare_model)
    with pytest.raises(InvalidRequest, match="no system role"):
        text_model.encode_chat([{"role": "system", "content": "x"}])


def test_half_of_a_surrogate_pair_is_refused(bare_model: Path) -> None:
    text_model = load_text_model(bare_model)
    with pytest.raises(InvalidRequest, match="not Unicode"):
        text_model.encode("\ud800")


@pytest.mark.model
@pytest.mark.parametrize("damage", ["vocab_size", "not json", "no tokenizer", "bad template"])
def test_a_broken_folder_is_named(bare_model: Path, damage: str) -> None:
    if damage == "vocab_size":
        (bare_model / "config.json").write_text("{}")
    elif damage == "not json":
        (bare_model / "config.json").write_text("{")
    elif damage == "no tokenizer":
        (bare_model / "tokenizer.json").unlink()
    else:
        (bare_model / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match=str(bare_model)):
        load_text_model(bare_model)


def test_the_cause_of_a_failed_start_is_one_line() -> None:
    told = {
        "Drafter": "Error:\nray::x (pid=1)\n  File y\nRuntimeError: Traceback (most recent\n"
        "  File z\ncluster.errors.CheckpointError: field gamma is 0\n",
        "Router": "2 of 2 replicas are starting",
    }
    error = failure(told)
    assert isinstance(error, Unavailable)
    assert error.message == "not all replicas started: Drafter: CheckpointError: field gamma is 0"
    assert "2 of 2" in failure({"Router": told["Router"]}).message


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "")]
)
def test_a_taken_port_is_named(family: socket.AddressFamily, host: str) -> None:
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc_port: {port} is taken") as caught:
            require_free(port)
        assert "--port" in caught.value.hint
    require_free(port)


def test_the_port_is_checked_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without it makes no such socket, whatever Python was built with."""

    class OnlyV4(socket.socket):
        def __init__(self, family: int = socket.AF_INET) -> None:
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("deploy.service.socket.socket", OnlyV4)
    require_free(port)

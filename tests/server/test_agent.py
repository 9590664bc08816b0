"""A coding agent's session: mini-swe-agent through litellm, on the true engine with a small random model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.server.asking import MODEL
from tests.server.fake_engine import shipped_tokenizer
from tests.server.small_model import assert_idle

SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
    "LITELLM_TELEMETRY": "False",
    "MSWEA_CONFIGURED": "1",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HARMLESS = ("echo x > made", "ls -a", "false")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory):
    """mini-swe-agent's modules, imported with a configuration folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("agent")))
        pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: it is a dev extra")
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel

        yield DefaultAgent, LitellmModel, LocalEnvironment


def call_grammar(*commands: str) -> str:
    """A call of the agent's one tool with one of the commands: a random model's own could be any."""
    special = shipped_tokenizer().special_tokens
    token = {name: f"<[{number}]>" for name, number in special.items()}
    choice = " | ".join(map(json.dumps, commands))
    key = f'{token["<arg_key>"]} "command" {token["</arg_key>"]}'
    value = f"{token['<arg_value>']} ({choice}) {token['</arg_value>']}"
    return f'start: {token["<tool_call>"]} "bash" {key} {value} {token["</tool_call>"]}'


def session(agents: Any, base: str, folder: Path, steps: int, **request: Any) -> tuple[dict, Any]:
    """How it ended, and the agent."""
    DefaultAgent, LitellmModel, LocalEnvironment = agents
    arguments = {"api_base": f"{base}/v1", "api_key": "none", "drop_params": True, "timeout": 60, **request}
    agent = DefaultAgent(
        LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=arguments, cost_tracking="ignore_errors"),
        LocalEnvironment(cwd=str(folder), env={"PATH": os.environ["PATH"]}),
        system_template="You are a programmer with a shell.",
        instance_template="Do this: {{task}}. Then run `" + SUBMIT + "`.",
        step_limit=steps,
    )
    return agent.run("make a file"), agent


def calling(*commands: str) -> dict[str, Any]:
    extra = {"structured_outputs": {"grammar": call_grammar(*commands)}}
    return {"reasoning_effort": "none", "max_tokens": 200, "extra_body": extra}


def test_a_session_of_tool_calls_goes_on_to_its_limit(agents, real_base, real_engine, tmp_path):
    """P71: each turn finds the turns before it in the cache."""
    ended, agent = session(agents, real_base, tmp_path, 5, **calling(*HARMLESS))
    assert ended["exit_status"] == "LimitsExceeded"
    answers = [message for message in agent.messages if message.get("role") == "assistant"]
    assert len(answers) == 5
    for answer in answers:
        assert [action["command"] in HARMLESS for action in answer["extra"]["actions"]] == [True]
    usages = [answer["extra"]["response"]["usage"] for answer in answers]
    for usage in usages[1:]:
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 200
    results = [message for message in agent.messages if message.get("role") == "tool"]
    assert len(results) == 5
    assert all("<returncode>" in result["content"] for result in results)
    assert_idle(real_engine)


def test_a_session_that_submits_ends_there(agents, real_base, real_engine, tmp_path):
    ended, agent = session(agents, real_base, tmp_path, 5, **calling(SUBMIT))
    assert ended["exit_status"] == "Submitted"
    assert agent.n_calls == 1
    assert_idle(real_engine)


def test_replies_without_a_call_are_asked_for_again(agents, real_base, real_engine, tmp_path):
    """The agent's own rule for them ends the session, not an error of the protocol."""
    how = {"reasoning_effort": "none", "seed": 2, "max_tokens": 20, "tool_choice": "none"}
    ended, agent = session(agents, real_base, tmp_path, 8, **how)
    assert ended["exit_status"] == "RepeatedFormatError"
    assert agent.n_calls == 3
    assert_idle(real_engine)

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest
from sparkpin_modkit import EXIT_CODE, install_once, report, reporting_failure
from sparkpin_modkit.testing import parse_reports

pytestmark = pytest.mark.usefixtures("unregistered")


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("vllm.sparkpin")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield stream
    logger.manager._clear_cache()


def test_report_is_one_compact_line(vllm_log: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    report("sample", "active", version="0.1.0", V=3, note="a\nb")
    assert vllm_log.getvalue() == (
        'SPARKPIN_MOD {"mod":"sample","event":"active","version":"0.1.0","V":3,"note":"a\\nb"}\n'
    )
    assert capsys.readouterr().err == ""


def test_report_with_a_percent_sign_and_a_strange_value(vllm_log: io.StringIO) -> None:
    report("sample", "failed", error="100%s", where=ValueError)
    assert parse_reports(vllm_log.getvalue()) == [
        {"mod": "sample", "event": "failed", "error": "100%s", "where": "<class 'ValueError'>"}
    ]


@pytest.mark.parametrize("swallow", ["level", "handler", "disabled"])
def test_report_falls_back_to_stderr(
    vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], swallow: str
) -> None:
    logger = logging.getLogger("vllm.sparkpin")
    if swallow == "level":
        monkeypatch.setattr(logger, "level", logging.ERROR)
        logger.manager._clear_cache()
    elif swallow == "handler":
        monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    else:
        monkeypatch.setattr(logger, "disabled", True)
    report("sample", "active")
    assert vllm_log.getvalue() == ""
    assert parse_reports(capsys.readouterr().err) == [{"mod": "sample", "event": "active"}]


def test_unknown_event_raises() -> None:
    with pytest.raises(ValueError, match="event 'on'"):
        report("sample", "on")


def test_reporting_failure_reports_and_raises(vllm_log: io.StringIO) -> None:
    with pytest.raises(KeyError), reporting_failure("sample", version="1"):
        raise KeyError("k")
    assert parse_reports(vllm_log.getvalue()) == [
        {"mod": "sample", "event": "failed", "error": "KeyError: 'k'", "version": "1"}
    ]


def test_install_once_installs_once() -> None:
    calls: list[int] = []
    assert install_once("sample", "1", lambda: calls.append(1))
    assert install_once("sample", "1", lambda: calls.append(1))
    assert calls == [1]


def test_switched_off_installs_nothing(monkeypatch: pytest.MonkeyPatch, vllm_log: io.StringIO) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_SAMPLE", "0")
    calls: list[int] = []
    assert not install_once("sample", "1", lambda: calls.append(1))
    assert calls == []
    assert parse_reports(vllm_log.getvalue()) == [{"mod": "sample", "event": "off", "version": "1"}]


def test_failing_install_stops_the_process(vllm_log: io.StringIO) -> None:
    def broken() -> None:
        raise ImportError("no such module")

    with pytest.raises(SystemExit) as caught:
        install_once("sample", "1", broken)
    assert caught.value.code == EXIT_CODE
    assert parse_reports(vllm_log.getvalue())[0]["error"] == "ImportError: no such module"


def test_bad_switch_stops_the_process(monkeypatch: pytest.MonkeyPatch, vllm_log: io.StringIO) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_SAMPLE", "yes")
    with pytest.raises(SystemExit) as caught:
        install_once("sample", "1", lambda: None)
    assert caught.value.code == EXIT_CODE
    assert parse_reports(vllm_log.getvalue())[0]["event"] == "failed"


def test_vllm_plugin_loader_lets_the_exit_through() -> None:
    """The whole scheme rests on this: were it swallowed, vLLM would serve without the mod."""
    code = (
        "import vllm.plugins as p\n"
        "from sparkpin_modkit import install_once\n"
        "def broken(): raise ValueError('broken mod')\n"
        "p.load_plugins_by_group = lambda group: {'sample': lambda: install_once('sample', '1', broken)}\n"
        "p.load_general_plugins()\n"
        "print('served without the mod')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == EXIT_CODE
    assert "served" not in done.stdout
    reports = parse_reports(done.stdout + done.stderr)
    assert reports == [{"mod": "sample", "event": "failed", "error": "ValueError: broken mod", "version": "1"}]

"""What is in `deploy/` fits the plugin: metrics are published, flags and files as they must be."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from packaging.utils import parse_wheel_filename

from sglang_ext import __version__
from sglang_ext.assembly import preflight
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.verdict import TESTED_FILE
from sglang_ext.seam.metrics import names as metric_names
from sglang_ext.settings.arguments import KNOWN, flag
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.settings.flags import add_flags, config_from_namespace
from sglang_ext.settings.values import flag_name
from sglang_ext.tiers.protection.keys import write_key_file
from sglang_ext.tiers.records.record import VerifyResult
from tests.unit.test_counters import documented

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "hier-kv.dashboard.json"
RULES = ROOT / "deploy" / "hier-kv.rules.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"
# Of docker, pip and kubectl, in commands that the files show.
OTHERS_FLAGS = {
    *("--from-file", "--gpus", "--mount", "--no-cache-dir", "--shm-size", "--stop-timeout"),
    *("--ulimit",),
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool is installed"
)
LABELS = {"model_name", "instance", "tp_rank", "pp_rank", "event", "of", "le"}


def expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def selections() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Metrics that are asked for, each with its labels' operators and values."""
    for expression in expressions():
        yield from selections_of(expression)


def selections_of(expression: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    for name, labels in re.findall(r"(sglang:\w+)(?:\{([^}]*)\})?", expression):
        asked = re.findall(r'(\w+)(=~|=)"([^"]*)"', labels)
        yield name, {label: (operator, value) for label, operator, value in asked}


def published() -> dict[str, metric_names.Metric]:
    """What `/metrics` calls the plugin's metrics."""
    names = {f"{count.name}_total": count for count in metric_names.COUNTS}
    names |= {gauge.name: gauge for gauge in metric_names.GAUGES}
    for end in ("bucket", "sum"):
        names |= {f"{of.name}_{end}": of for of in metric_names.HISTOGRAMS}
    return names


def known_values(metric: metric_names.Metric) -> set[str]:
    """What a metric's label can be, as far as the documents name it."""
    if metric in metric_names.TIMES:
        return set(metric_names.TIMES[metric])
    names = documented()
    names |= {f"disk_{name}" for name in names} | {f"remote_{name}" for name in names}
    names |= {f"rejected_{result.value}" for result in VerifyResult}
    names |= {f"disk_dropped_{reason}" for reason in ("full", "io", "malformed", "closed")}
    found = (metric_names.gauge_of(name) or metric_names.count_of(name) for name in names)
    return {series.value for series in found if series is not None and series.metric is metric}


def run_promtool(action: str, path: Path) -> None:
    """`promtool check rules` or `promtool test rules`, which is content with a file."""
    done = subprocess.run(
        ["promtool", action, "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_something_to_look_at() -> None:
    assert len(list(selections())) > 40


@pytest.mark.parametrize(("name", "labels"), list(selections()))
def test_what_is_asked_for_is_published(name: str, labels: dict[str, tuple[str, str]]) -> None:
    assert labels.keys() <= LABELS
    metric = published()[name]
    operator, value = labels.get(metric.label, ("=~", ".*"))
    others = {"event", "of"} - {metric.label}
    assert not others & labels.keys()
    known = known_values(metric)
    asked = [value] if operator == "=" else alternatives(value)
    for one in asked:
        assert metric.label not in labels or any(re.fullmatch(one, name) for name in known), one


# Of these each tensor parallel rank counts all, and each pipeline stage: their sum over ranks is
# nothing's number.
COUNTED_ALIKE = (metric_names.REQUESTS, metric_names.TOKENS, metric_names.WAITING_REQUESTS)
ONE_RANK = {"tp_rank": ("=", "0"), "pp_rank": ("=~", "0?")}


def is_a_number(expression: str) -> bool:
    """Whether an expression is no share, for which it is all one how many ranks count."""
    return not re.search(r" [/>] .*sum", expression)


def test_a_number_of_requests_or_tokens_is_of_one_rank() -> None:
    seen = 0
    for expression in filter(is_a_number, expressions()):
        for name, labels in selections_of(expression):
            if published()[name] in COUNTED_ALIKE:
                seen += 1
                assert ONE_RANK.items() <= labels.items(), expression
    assert seen >= 3


def alternatives(pattern: str) -> list[str]:
    """The parts of `a|b(c|d)`, split where no bracket is open."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_a_value_has_one_metric_in_base_units() -> None:
    def at(series: metric_names.Series | None) -> Any:
        return series and (series.metric.name.removeprefix("sglang:hier_kv_"), *series[1:])

    assert at(metric_names.count_of("saved_pages")) == ("pages", "saved_pages", 1.0)
    assert at(metric_names.count_of("load_us")) == ("busy_seconds", "load", 1e-6)
    assert at(metric_names.count_of("disk_bytes_moved")) == ("bytes", "disk_bytes_moved", 1.0)
    assert at(metric_names.count_of("rejected_foreign")) == ("records", "rejected_foreign", 1.0)
    assert at(metric_names.count_of("save_failures")) == ("events", "save_failures", 1.0)
    assert at(metric_names.count_of("cost_load")) == ("requests", "cost_load", 1.0)
    assert at(metric_names.count_of("corrections")) == ("values", "corrections", 1.0)
    dropped_lines = "event_log_dropped_lines"
    assert at(metric_names.count_of(dropped_lines)) == ("lines", dropped_lines, 1.0)
    assert at(metric_names.count_of("saves_ended")) == ("nodes", "saves_ended", 1.0)
    assert at(metric_names.count_of("remote_get_bytes")) == ("bytes", "remote_get_bytes", 1.0)
    assert at(metric_names.count_of("remote_get_ok")) == ("records", "remote_get_ok", 1.0)
    # Times that are no work are in histograms alone.
    for name in ("held_disk_us", "cost_read_us", "cost_read_expected_us"):
        assert metric_names.count_of(name) is None
    assert at(metric_names.time_of("read")) == ("duration_seconds", "read", 1.0)
    assert at(metric_names.time_of("held_disk")) == ("wait_seconds", "disk", 1.0)
    assert at(metric_names.time_of("cost_read")) == ("cost_actual_seconds", "read", 1.0)
    assert at(metric_names.time_of("cost_read_expected")) == ("cost_expected_seconds", "read", 1.0)
    assert at(metric_names.gauge_of("host_pages")) == ("held_pages", "host_pages", 1.0)
    assert at(metric_names.gauge_of("disk_open_fds")) == ("open_files", "disk_open_fds", 1.0)
    assert at(metric_names.gauge_of("save_queue")) == ("waiting_nodes", "save_queue", 1.0)
    assert at(metric_names.count_of("pages_of_unknown_codec"))[0] == "pages"
    assert metric_names.gauge_of("saved_pages") is None
    assert at(metric_names.estimate_of("disk_read_mb_s")) == (
        "speed_bytes_per_second",
        "disk_read",
        1e6,
    )
    assert at(metric_names.estimate_of("decode_step_ms")) == (
        "estimated_seconds",
        "decode_step",
        1e-3,
    )
    assert metric_names.estimate_of("disk_samples") is None


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert panel["title"]
        assert not cells & covered
        assert max(x for x, _ in cells) < 24
        covered |= cells
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)


@needs_promtool
def test_promtool_takes_all_of_it(tmp_path: Path) -> None:
    rules = [
        {"record": f"test:panel:{number}", "expr": re.sub(r"\$__rate_interval", "1m", expression)}
        for number, expression in enumerate(expressions())
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for path in (RULES, panels):
        run_promtool("check", path)


TENANT_PANELS = {
    "Prompt tokens reused, by tenant": {"1": 0.75, "others": 0.25},
    "Prompt tokens asked for, by tenant": {"1": 100.0, "others": 20.0},
    "Bytes in a file:// store, by tenant": {"1": 7.0, "others": 9.0},
}
# Labels of the schedulers that tell the same.
RANKS = {
    "one": ['tp_rank="0"'],
    "two ranks": ['tp_rank="0"', 'tp_rank="1"'],
    "two stages of two": [f'tp_rank="{rank}",pp_rank="{stage}"' for rank in "01" for stage in "01"],
}


def of_ranks(ranks: str, series: dict[tuple[str, str], str]) -> list[dict[str, str]]:
    """Series for promtool, each as all of these ranks tell it."""
    return [
        {
            "series": f'{name}{{{label},model_name="m",instance="a:30000",dp_rank="0",{place}}}',
            "values": values,
        }
        for place in RANKS[ranks]
        for (name, label), values in series.items()
    ]


def play_panels(
    folder: Path, series: list[dict[str, str]], shown: dict[str, dict[str, float]], label: str
) -> None:
    """Has promtool play series to panels' first expressions, and compare what they show."""
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    asked = {
        title: re.sub(r"\$(model|instance)", ".*", panels[title]["targets"][0]["expr"])
        for title in shown
    }
    checks = [
        {
            "expr": asked[title].replace("$__rate_interval", "5m"),
            "eval_time": "8m",
            "exp_samples": [
                {"labels": f'{{{label}="{name}"}}', "value": value} for name, value in each.items()
            ],
        }
        for title, each in shown.items()
    ]
    path = folder / "panels.test.yml"
    case = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    path.write_text(yaml.safe_dump({"tests": [case]}))
    run_promtool("test", path)


@needs_promtool
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_shown_of_tenants_is_each_ones(ranks: str, tmp_path: Path) -> None:
    """Counts of two tenants beside those of all, which are in neither."""
    tokens = {
        "requested_tokens": 7200, "reused_disk_tokens": 4800, "tenant_1_requested_tokens": 6000,
        "tenant_1_reused_host_tokens": 3000, "tenant_1_reused_disk_tokens": 1500,
        "tenant_others_requested_tokens": 1200, "tenant_others_reused_remote_tokens": 300,
    }  # fmt: skip
    held = {"remote_bytes": 16, "quota_tenant_1_remote_bytes": 7, "quota_others_remote_bytes": 9}
    series = {
        ("sglang:hier_kv_tokens_total", f'event="{name}"'): f"0+{each}x9"
        for name, each in tokens.items()
    }
    series |= {
        ("sglang:hier_kv_held_bytes", f'of="{name}"'): f"{each}x9" for name, each in held.items()
    }
    play_panels(tmp_path, of_ranks(ranks, series), TENANT_PANELS, "tenant")


@needs_promtool
@pytest.mark.parametrize("ranks", RANKS)
def test_a_request_is_shown_once_whichever_ranks_compute_it(ranks: str, tmp_path: Path) -> None:
    chosen = {"cost_load": 120, "cost_partial": 60, "cost_recompute": 30}
    series = {
        ("sglang:hier_kv_requests_total", f'event="{name}"'): f"0+{each}x9"
        for name, each in chosen.items()
    } | {("sglang:hier_kv_waiting_requests", 'of="waiting_requests"'): "5x9"}
    told = of_ranks(ranks, series)
    shown = {"Load, compute, or both": {name: each / 60 for name, each in chosen.items()}}
    play_panels(tmp_path, told, shown, "event")
    play_panels(tmp_path, told, {"What waits": {"waiting_requests": 5.0}}, "of")


# The container.


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [document for document in documents() if document["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("StatefulSet")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    [found] = pod()["containers"]
    assert isinstance(found, dict)
    return found


def parsed(args: list[str]) -> tuple[HierKVConfig, dict[str, str]]:
    """The plugin's settings in a command line, and SGLang's flags with their values."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    namespace, others = parser.parse_known_args(args)
    config = config_from_namespace(namespace)
    assert config is not None
    pairs = (one.removeprefix("--").partition("=") for one in others)
    return config, {name: value for name, _, value in pairs}


def in_bytes(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) << {"Mi": 20, "Gi": 30, "Ti": 40}[unit]


def dockerfile() -> str:
    return DOCKERFILE.read_text()


def test_hadolint_takes_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if hadolint is None:
        pytest.skip("no hadolint is installed")
    done = subprocess.run(
        [hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("release", ["1.25", "1.30", "1.37"])
def test_kubernetes_takes_every_document(release: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents():
        validator.validate(document, release, strict=True)


@pytest.mark.parametrize("path", [DOCKERFILE, KUBERNETES], ids=lambda path: path.name)
def test_every_flag_is_one_of_the_plugin_or_of_sglang(path: Path) -> None:
    known = {flag_name(item.name) for item in fields(HierKVConfig)} | {"--enable-hier-kv"}
    known |= {f"--{flag(name)}" for name in KNOWN}
    known |= {"--all"}  # of `hier-kv prune`
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", path.read_text()))
    assert "--hier-kv-disk-dir" in found
    assert found - OTHERS_FLAGS <= known


def test_the_image_is_of_a_tested_sglang_and_of_this_release() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile(), re.MULTILINE))
    assert defaults["SGLANG_VERSION"] in json.loads(TESTED_FILE.read_text())
    assert defaults["HIER_KV_VERSION"] == __version__
    wheel = defaults["HIER_KV_WHEEL"].replace("${HIER_KV_VERSION}", __version__)
    name, version, *_ = parse_wheel_filename(wheel)
    assert (name, str(version)) == ("sglang-hier-kv", __version__)
    assert re.findall(r"^FROM (.*)$", dockerfile(), re.MULTILINE) == [
        "lmsysorg/sglang:v${SGLANG_VERSION}"
    ]
    image = f"sglang-hier-kv:{__version__}"
    assert container()["image"] == image
    assert set(re.findall(r"sglang-hier-kv:[\w.]+", dockerfile())) == {image}


def test_the_server_in_the_dockerfile_is_one_that_starts() -> None:
    line = re.sub(r"\\\n# *", "", dockerfile())
    command = re.search(r"-m sglang\.launch_server (.*)", line)
    assert command is not None
    words = command[1].split()
    joined = re.sub(r" (?!--)", "=", " ".join(words)).split()
    config, sglangs = parsed(joined)
    config.validate()
    mounted = set(re.findall(r"-v \S+?:(/[^\s:]+)", line))
    assert config.disk_dir in mounted
    assert str(Path(sglangs["model-path"]).parent) in mounted


def test_a_pod_is_replaced_only_when_it_has_let_go_of_its_disk() -> None:
    spec = of_kind("StatefulSet")["spec"]
    [claim] = spec["volumeClaimTemplates"]
    volume, kind = of_kind("PersistentVolume")["spec"], of_kind("StorageClass")
    assert "local" in volume
    for one in (claim["spec"], volume):
        assert one["storageClassName"] == kind["metadata"]["name"]
        assert one["accessModes"] == ["ReadWriteOnce"]
    # No update strategy that removes a pod and goes on: RollingUpdate is the default.
    assert "updateStrategy" not in spec
    assert spec["serviceName"] == of_kind("Service")["metadata"]["name"]


def test_labels_and_ports_meet() -> None:
    template, service = of_kind("StatefulSet")["spec"]["template"], of_kind("Service")["spec"]
    labels = template["metadata"]["labels"]
    assert of_kind("StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert service["selector"] == labels
    [port] = container()["ports"]
    [outside] = service["ports"]
    assert outside["targetPort"] == port["name"]
    _, sglangs = parsed(container()["args"])
    assert sglangs["port"] == str(port["containerPort"])
    assert sglangs["host"] == "0.0.0.0"
    notes = template["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == sglangs["port"]
    assert notes["prometheus.io/path"] == "/metrics"
    assert "enable-metrics" in sglangs


def test_what_the_flags_name_is_mounted() -> None:
    config, sglangs = parsed(container()["args"])
    [claim] = of_kind("StatefulSet")["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in pod()["volumes"]} | {claim["metadata"]["name"]}
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes
    assert mounts[config.disk_dir]["name"] == claim["metadata"]["name"]
    assert not mounts[config.disk_dir].get("readOnly")
    assert str(Path(sglangs["model-path"]).parent) in mounts
    [password] = parse_qs(urlsplit(config.remote_url).query)["password-file"]
    for path in (Path(config.key_file), Path(password)):
        assert mounts[str(path.parent)]["name"] == "secrets"
        assert f"--from-file={path.name}" in KUBERNETES.read_text()


def test_memory_and_disk_have_room_for_what_the_flags_ask() -> None:
    config, _ = parsed(container()["args"])
    resources = container()["resources"]
    assert resources["requests"] == resources["limits"]
    [shm] = [one["emptyDir"] for one in pod()["volumes"] if "emptyDir" in one]
    rest = in_bytes(resources["limits"]["memory"]) - config.host_bytes
    # 16 GiB: about what SGLang takes itself with a model of some 10 GB.
    assert rest - in_bytes(shm["sizeLimit"]) >= 16 * GIB
    wanted = config.disk_bytes + int((config.disk_free_floor + config.disk_segment_size) * GIB)
    [claim] = of_kind("StatefulSet")["spec"]["volumeClaimTemplates"]
    claimed = in_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert wanted <= claimed
    assert claimed <= in_bytes(of_kind("PersistentVolume")["spec"]["capacity"]["storage"])


def laid_out(folder: Path, mode: int) -> list[str]:
    """The server's arguments, with what the pod mounts in `folder`, as Kubernetes lays it out."""
    kv, secrets, data = folder / "kv", folder / "secrets", folder / "secrets" / "..1"
    kv.mkdir(mode=0o700)
    data.mkdir(parents=True)
    (secrets / "..data").symlink_to("..1")
    write_key_file(data / "key")
    (data / "redis-password").write_text("hunter2\n")
    for name in ("key", "redis-password"):
        (data / name).chmod(mode)
        (secrets / name).symlink_to(f"..data/{name}")
    places = {"/etc/hier-kv/": f"{secrets}/", "=/kv": f"={kv}"}
    arguments: list[str] = container()["args"]
    for inside, here in places.items():
        arguments = [one.replace(inside, here) for one in arguments]
    return arguments


def test_a_start_takes_what_the_pod_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = in_bytes(container()["resources"]["limits"]["memory"])
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    [secret] = [one["secret"] for one in pod()["volumes"] if "secret" in one]
    config, _ = parsed(laid_out(tmp_path, secret["defaultMode"]))
    config.validate()
    preflight.check_machine(config)
    assert not caplog.records
    assert "fsGroup" not in pod()["securityContext"]


def test_a_key_with_the_mode_that_an_fsgroup_gives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1 << 40)
    config, _ = parsed(laid_out(tmp_path, 0o440))
    with pytest.raises(HierKVConfigError, match="0440"):
        preflight.check_machine(config)


def sglang_source(path: str) -> str:
    spec = find_spec("sglang")
    assert spec is not None
    [place] = spec.submodule_search_locations or [""]
    return Path(place, "srt", path).read_text()


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_asks_what_sglang_answers_without_a_key(name: str) -> None:
    probe = container()[name]
    path = probe["httpGet"]["path"]
    assert f'@app.get("{path}")' in sglang_source("entrypoints/http_server.py")
    assert f'path.startswith("{path}")' in sglang_source("utils/auth.py")
    if path == "/health":  # it gives the scheduler so long to answer
        seconds = re.search(
            r'"SGLANG_HEALTH_CHECK_TIMEOUT", (\d+)', sglang_source("entrypoints/http_server.py")
        )
        assert seconds is not None
        assert probe["timeoutSeconds"] > int(seconds[1])


def test_a_stop_leaves_time_for_the_last_pages() -> None:
    source = sglang_source("managers/tokenizer_manager.py")
    scheduler = re.search(r"^_SCHEDULER_EXIT_TIMEOUT_SECS = (\d+)", source, re.MULTILINE)
    assert scheduler is not None
    before = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    polls = 2 * 5  # until it sees the signal, and that no request is left
    for_requests = pod()["terminationGracePeriodSeconds"] - before - polls - int(scheduler[1])
    assert for_requests >= 120
    # A shell in between would not hand SIGTERM on.
    assert container()["command"][0] == "python3"
    assert f"--stop-timeout {pod()['terminationGracePeriodSeconds']} " in dockerfile()


def test_no_variable_of_a_service_is_taken_for_one_of_sglang() -> None:
    assert "SGLANG_PORT = EnvInt" in sglang_source("environ.py")
    assert of_kind("Service")["metadata"]["name"] == "sglang"
    assert pod()["enableServiceLinks"] is False


def test_memory_may_be_locked_and_little_else() -> None:
    context = container()["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert context["allowPrivilegeEscalation"] is False
    # To another user than root the capability gives nothing.
    assert pod()["securityContext"]["runAsUser"] == 0
    assert "--ulimit memlock=-1" in dockerfile()

"""Wrong input: one readable line on stderr, nothing on stdout, exit code 2, nothing written."""

import pytest

WRONG = [
    # the command line itself
    ("no_such_command", "bogus", "No such command 'bogus'"),
    ("no_such_option", "ops --nope", "No such option: --nope"),
    ("op_missing", "explain", "Missing argument 'OP'"),
    ("model_missing", "optimize", "Missing argument 'MODEL'"),
    ("value_missing", "ops --json", "--json"),
    # ops
    ("explain_op", "explain nope", "no op named 'nope'. Ops: "),
    ("check_op", "check nope", "no op named 'nope'"),
    ("explain_dtype", "explain rms_norm --dtype int8", "'int8' is not one of 'bf16', 'fp16', 'fp32'"),
    ("explain_backend", "explain rms_norm --backend nope", "no backend named 'nope'. Allowed: auto, cuda"),
    ("check_backend", "check rms_norm --backend nope", "no backend named 'nope'"),
    ("cannot_run", "explain rms_norm --backend triton --device cpu", "rms_norm[triton] runs on cuda tensors, got cpu"),
    ("check_modes", "check rms_norm --modes eager,nope", "no mode named nope"),
    ("no_modes", "check rms_norm --modes ,", "no mode named"),
    ("check_seed", "check rms_norm --seed -1", "--seed"),
    # cases
    ("case_name", "explain rms_norm --case nope", "has no such case. Give sizes (M=8,N=4096) or one of: llama8b_train"),
    ("check_case", "check rms_norm --case nope", "has no such case"),
    ("case_grammar", "explain rms_norm --case M=8,N", "write it as M=8,N=4096"),
    ("case_empty_value", "explain rms_norm --case M=", "write it as M=8,N=4096"),
    ("case_size", "explain rms_norm --case Q=8", "rms_norm has no 'Q'. It has: M, N"),
    ("case_word", "explain rms_norm --case M=many", "--case M=many: it has to be a whole number, as in M=8192"),
    ("case_negative", "explain rms_norm --case M=-4", "--case M=-4: it has to be a whole number"),
    ("case_float", "explain rms_norm --case offset=x", "--case offset=x: it has to be a number"),
    ("case_bool", "explain rms_norm --case fp32_weight=7", "allowed are true and false"),
    ("case_too_large", "explain rms_norm --case M=100000000000000000000", "rms_norm has no such inputs"),
    # devices
    ("device", "explain rms_norm --device nope", "--device nope: allowed are cuda, cuda:N and cpu"),
    ("device_kind", "check rms_norm --device meta", "--device meta: allowed are"),
    ("gpu_number", "check rms_norm --device cuda:99", "--device cuda:99: torch sees"),
    ("bench_device", "bench norm --device nope", "--device nope"),
    ("calibrate_device", "calibrate --device nope", "--device nope"),
    ("model_device", "analyze x.py:make --device nope", "--device nope"),
    # bench
    ("suite_missing", "bench", "bench needs a SUITE: "),
    ("suite", "bench nope", "no bench suite named 'nope'"),
    ("suite_op", "bench norm swiglu", "suite 'norm' has no op swiglu"),
    ("suite_case", "bench norm rms_norm --case Q=8", "rms_norm has no 'Q'"),
    ("suite_case_word", "bench norm --case M=many", "it has to be a whole number"),
    ("peer", "bench norm rms_norm --against nope", "nope"),
    ("timing", "bench norm --timing fast", "'fast' is not one of 'sustained', 'paused'"),
    ("bench_dtype", "bench norm --dtype int8", "'int8' is not one of"),
    ("table_alone", "bench norm --table t.json", "give both"),
    ("table_contents", "bench norm --write-table --table notes.txt", "notes.txt: not JSON"),
    ("report_of_suite", "bench norm --report", "--report renders every result file; it takes no SUITE"),
    ("report_of_nothing", "bench --report --results nowhere", "no bench results under nowhere"),
    # models
    ("model", "analyze no/such/folder", "'no/such/folder' does not exist"),
    ("model_folder", "analyze folder", "no config.json"),
    ("model_file", "optimize missing.py:make", "there is no file 'missing.py'"),
    ("model_function", "optimize notes.py:absent", "has no function 'absent'"),
    ("model_result", "optimize notes.py:number", "returned int; it has to return (module, example inputs)"),
    ("model_raises", "optimize notes.py:broken", "ZeroDivisionError"),
    ("prompts", "optimize notes.py:linear --prompts missing.txt", "'missing.txt' cannot be read"),
    ("prompts_empty", "optimize notes.py:linear --prompts empty.txt", "holds no prompt"),
    ("prompts_lines", "optimize notes.py:linear --prompts wrong.jsonl", "line 1"),
    ("no_tokenizer", "optimize notes.py:linear --prompts notes.txt", "has no tokenizer"),
    ("goal", "optimize notes.py:linear --goal speed", "'speed' is not one of 'latency', 'throughput'"),
    ("allow", "optimize notes.py:linear --allow bf16,magic", "magic is not known. Allowed: static_decode"),
    ("accept_dtype", "optimize notes.py:linear --accept-dtype int8", "'int8' is not one of"),
    ("new_tokens", "analyze notes.py:linear --new-tokens 0", "--new-tokens"),
    ("budget", "optimize notes.py:linear --budget 0", "--budget"),
    # where results go
    ("json_folder", "ops --json folder", "folder is a folder"),
    ("json_folder_to_be", "ops --json new/", "new/ is a folder"),
    ("json_below_a_file", "explain rms_norm --json notes.txt/x/y.json", "notes.txt is not a folder"),
    ("json_doctor", "doctor --json folder", "folder is a folder"),
    ("json_check", "check rms_norm --json folder", "folder is a folder"),
    ("json_bench", "bench norm --json folder", "folder is a folder"),
    ("json_calibrate", "calibrate --json folder", "folder is a folder"),
    ("json_model", "analyze notes.py:linear --json folder", "folder is a folder"),
    ("html_folder", "optimize notes.py:linear --html folder", "folder is a folder"),
    ("page_below_a_file", "bench --report --output notes.txt", "notes.txt is not a folder"),
    ("table_below_a_file", "bench norm --write-table --table notes.txt/t.json", "notes.txt is not a folder"),
]


@pytest.fixture
def belongings(place):
    """What a user has lying about, right and wrong."""
    (place / "folder").mkdir()
    (place / "notes.txt").write_text("a prompt")
    (place / "empty.txt").write_text("\n\n")
    (place / "wrong.jsonl").write_text("{}\n")
    (place / "notes.py").write_text(
        "import torch\n"
        "def number(): return 3\n"
        "def broken(): return 1 / 0\n"
        "def linear(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    return place


def refused(done, said: str) -> None:
    """The promise of this file, whatever was wrong."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("tilewright: ")
    assert said in line


def contents(place) -> set[str]:
    return {str(path) for path in place.parent.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(("command", "said"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_it_is_refused_in_one_line(tilewright, belongings, command, said):
    before = contents(belongings)
    refused(tilewright(*command.split()), said)
    assert contents(belongings) == before


@pytest.mark.parametrize("command", ["explain nope --json out/report.json", "bench nope --json out/report.json"])
def test_no_folder_is_made_for_a_result_that_never_comes(tilewright, place, command):
    refused(tilewright(*command.split()), "nope")
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("variable", "value", "command", "said"),
    [
        ("TILEWRIGHT_LOG", "loud", "ops", "TILEWRIGHT_LOG: 'loud' is not a log level; allowed: debug"),
        ("TILEWRIGHT_DISABLE_FALLBACK", "perhaps", "ops", "TILEWRIGHT_DISABLE_FALLBACK: 'perhaps' is not a switch"),
        ("DISABLE_FALLBACK", "perhaps", "ops", "DISABLE_FALLBACK: 'perhaps' is not a switch"),
        ("TILEWRIGHT_BACKEND", "nope", "explain rms_norm", "no backend named 'nope'"),
        ("TILEWRIGHT_TUNING_TABLE", "nowhere.json", "explain rms_norm", "TILEWRIGHT_TUNING_TABLE=nowhere.json"),
        ("TILEWRIGHT_CACHE_DIR", "notes.txt", "calibrate --device cpu", "notes.txt is not a folder"),
        ("TILEWRIGHT_CACHE_DIR", "notes.txt", "analyze notes.py:linear --device cpu", "notes.txt is not a folder"),
    ],
)
def test_so_is_a_malformed_variable(tilewright, belongings, monkeypatch, variable, value, command, said):
    monkeypatch.setenv(variable, value)
    refused(tilewright(*command.split()), said)


def test_help_does_not_mind_a_malformed_variable(tilewright, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_LOG", "loud")
    assert tilewright("--help").exit_code == 0


def test_a_path_that_only_fails_when_written_is_refused_too(tilewright, monkeypatch):
    """A disk may be full and a file system read-only."""
    from pathlib import Path

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    refused(tilewright("ops", "--json", "ops.json"), "ops.json cannot be written: No space left on device")


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    from pathlib import Path

    from tilewright.cli.output import write
    from tilewright.errors import UsageError

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    result = tmp_path / "result.json"
    result.write_text("earlier")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write(result, "later")
    assert result.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [result], "no draft is left"


def test_a_missing_optional_library_is_named_before_the_work(tilewright, belongings, monkeypatch):
    monkeypatch.setattr("tilewright.cli.options.find_spec", lambda name: None if name == "matplotlib" else name)
    done = tilewright("optimize", "notes.py:linear", "--html", "page.html")
    refused(done, "needs matplotlib: pip install 'tilewright[report]'")

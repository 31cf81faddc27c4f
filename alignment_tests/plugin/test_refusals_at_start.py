"""When the plugin begins: another SGLang, another model package, or a start that went wrong end the process."""

import pytest

from minitransformer.errors import InputError
from minitransformer.plugins.sglang import ANY_VERSION_VARIABLE, MODEL_PACKAGE, MODEL_PACKAGE_VARIABLE, plugin


def versions(monkeypatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise plugin.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(plugin, "version", version)


def test_without_sglang_an_error_says_how_to_install_it(monkeypatch):
    versions(monkeypatch, None)
    with pytest.raises(InputError, match=r"SGLang is not installed; `pip install 'minitransformer\[sglang\]'`"):
        plugin.check_version()


def test_another_version_is_refused_unless_allowed(monkeypatch):
    versions(monkeypatch, "0.5.18")
    with pytest.raises(InputError, match="0.5.18 is installed, 0.5.17 was tested"):
        plugin.check_version()
    monkeypatch.setenv(ANY_VERSION_VARIABLE, "1")
    plugin.check_version()


def test_the_tested_version_is_taken(monkeypatch):
    versions(monkeypatch, "0.5.17")
    plugin.check_version()


def test_nothing_happens_without_the_variable(monkeypatch):
    monkeypatch.delenv(MODEL_PACKAGE_VARIABLE, raising=False)
    versions(monkeypatch, None)
    monkeypatch.setattr(plugin, "activate", lambda: pytest.fail("our model was put into SGLang"))
    plugin.plugin()


@pytest.mark.parametrize("value", ["minitransformer.plugins.sglang", MODEL_PACKAGE + ".qwen3_moe", "miniTransformer"])
def test_a_value_that_almost_asks_for_our_model_ends_the_process(monkeypatch, value):
    monkeypatch.setenv(MODEL_PACKAGE_VARIABLE, value)
    with pytest.raises(SystemExit, match=f"is '{value}'; set it to {MODEL_PACKAGE}$"):
        plugin.plugin()
    monkeypatch.setenv(MODEL_PACKAGE_VARIABLE, "somebody.elses.models")
    plugin.plugin()


@pytest.mark.parametrize("error", [InputError("a reason"), RuntimeError("a reason"), ImportError("a reason")])
def test_a_plugin_that_fails_ends_the_process(monkeypatch, error):
    """SGLang catches Exception and would serve its own model; SystemExit it does not catch."""

    def activate() -> None:
        raise error

    monkeypatch.setenv(MODEL_PACKAGE_VARIABLE, MODEL_PACKAGE)
    versions(monkeypatch, "0.5.17")
    monkeypatch.setattr(plugin, "activate", activate)
    with pytest.raises(SystemExit, match="miniTransformer is not live, so this server stops: .*a reason"):
        plugin.plugin()


def test_a_plugin_that_sglang_will_not_call_ends_the_process(monkeypatch):
    versions(monkeypatch, "0.5.17")
    monkeypatch.setenv("SGLANG_PLUGINS", "another, third")
    with pytest.raises(SystemExit, match="leaves its plugin out; add minitransformer"):
        plugin.require_installed()
    monkeypatch.setenv("SGLANG_PLUGINS", "another,minitransformer")
    monkeypatch.setattr(plugin, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit, match="not installed, so SGLang can't find its plugin"):
        plugin.require_installed()


def test_a_plugin_that_was_not_called_ends_the_process(monkeypatch):
    monkeypatch.setattr(plugin, "_active", False)
    with pytest.raises(SystemExit, match="SGLang did not run the plugin"):
        plugin.require_active()

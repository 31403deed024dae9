"""Asks the Hugging Face hub once, before its own client does, which retries for 20 to 50 s without a network."""

from __future__ import annotations

import os

from diloco.errors import DataError

__all__ = ["check_reachable"]


def check_reachable(key: str, kind: str, name: str) -> None:
    """Asks the hub once whether it has the `kind` ('dataset' or 'model') called `name`, the value of the setting `key`.

    Does not ask in offline mode (HF_HUB_OFFLINE): there the client answers at once, from its cache.

    Raises:
        DataError: no network, no such name, or no permission.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = huggingface_hub.HfApi()
    try:
        (hub.dataset_info if kind == "dataset" else hub.model_info)(name, timeout=10)
    except (HfHubHTTPError, HFValidationError) as error:
        raise DataError(
            f"{key}: {name!r} is no {kind} that the Hugging Face hub shows you ({_one_line(error)}); check the name, "
            f"or log in with `hf auth login`"
        ) from error
    except Exception as error:  # huggingface_hub has changed its HTTP client, and so its exceptions, twice
        raise DataError(
            f"{key}: {name!r} cannot be fetched, the Hugging Face hub is not reachable ({_one_line(error)}); check the "
            f"network, or use local files"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

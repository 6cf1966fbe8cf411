"""Whether the Hugging Face Hub answers."""

import threading

# A Hub that takes longer to answer is taken for one that cannot be reached.
_PATIENCE_SECONDS = 2.0


def answers() -> bool:
    """Whether the Hub is there; where it is not, libraries would try for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    # In a thread: the look-up of a name may wait longer than any time limit of a request.
    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
            answered.set()
        except Exception:  # of whatever library it uses for requests
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    return answered.is_set()

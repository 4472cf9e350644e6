"""Example inputs of video models that track objects: a frame, and a session with a click on the object or its name.

A session remembers earlier frames. These sessions reset with each frame, so that every call is that of a first frame,
since a trace may call a model more than once. The library's processors make the same inputs from a video and a prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from zoo_shapes import floats


def _first_frame(kind: str, module: str, asked: Callable[[Any], None]) -> Callable[[Any, int], dict[str, Any]]:
    """A function that makes examples; `asked` adds the prompt to the session."""

    def example(config: Any, batch: int) -> dict[str, Any]:
        """One frame for any batch, as a session is of one video."""
        parent: Any = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), kind)

        def add_new_frame(session: Any, pixel_values: torch.Tensor, frame_idx: int | None = None) -> int:
            devices = ("inference_device", "inference_state_device", "video_storage_device")
            of_frame = dict.fromkeys(devices, pixel_values.device)
            session.__init__(video_height=720, video_width=1280, dtype=torch.float32, **of_frame)
            asked(session)
            index: int = parent.add_new_frame(session, pixel_values, frame_idx)
            return index

        session = type(kind, (parent,), {"add_new_frame": add_new_frame})()
        side = config.image_size
        return {"inference_session": session, "frame": floats(1, 3, side, side)}

    return example


def _point(session: Any) -> None:
    """Add a click on object 1."""
    click = {"point_coords": torch.full((1, 1, 1, 2), 100.0), "point_labels": torch.ones(1, 1, 1, dtype=torch.int32)}
    place = session.obj_id_to_idx(1)
    session.add_point_inputs(place, 0, {name: value.to(session.inference_device) for name, value in click.items()})
    session.obj_with_new_inputs = [1]


def _words(session: Any) -> None:
    """Add a text of 32 tokens that names the object."""
    prompt = session.add_prompt("a person")
    session.prompt_input_ids[prompt] = torch.ones(1, 32, dtype=torch.int64, device=session.inference_device)
    session.prompt_attention_masks[prompt] = torch.ones(1, 32, dtype=torch.int64, device=session.inference_device)


SESSIONS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "EdgeTamVideoModel": _first_frame("EdgeTamVideoInferenceSession", "edgetam_video", _point),
    "Sam2VideoModel": _first_frame("Sam2VideoInferenceSession", "sam2_video", _point),
    "Sam3TrackerVideoModel": _first_frame("Sam3TrackerVideoInferenceSession", "sam3_tracker_video", _point),
    "Sam3VideoModel": _first_frame("Sam3VideoInferenceSession", "sam3_video", _words),
}

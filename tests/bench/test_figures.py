"""The figures of speed and memory over the image size."""

from repro.bench import figures


def test_a_family_with_points_in_the_last_panel_alone_is_named(tmp_path, monkeypatch):
    """DeiT's memory is known, and its time is not."""
    drawn = []
    monkeypatch.setattr(figures, "save_png", lambda figure, path: drawn.append(figure))

    def row(latency):
        return {"image_size": [224, 224], "status": "ok", "host": False, "latency_ms": latency, "peak_memory_mib": 9.0}

    series = {"vittt": [row(2.0)], "deit": [row(None)]}
    figures.against_resolution(tmp_path / "a.png", series, "", ("latency_ms", "peak_memory_mib"))
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [figures.STYLES[name][0] for name in series]

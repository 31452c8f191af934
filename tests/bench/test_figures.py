"""The figures of speed and memory over the image size."""

from repro.bench import efficiency, figures


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


def test_figures_show_rows_of_one_number_of_threads(tmp_path, monkeypatch):
    """The rows of DeiT are of other threads."""
    drawn = []
    monkeypatch.setattr(figures, "against_resolution", lambda path, series, title: drawn.append(series))
    monkeypatch.setattr(figures, "at_largest", lambda path, bars, title: drawn.extend(bars.values()))

    def row(family, side, device):
        about = {"model": f"{family}_tiny_patch16_224", "attention": "unfused" if family == "deit" else None}
        about |= {"batch_size": 1, "dtype": "fp32", "mode": "infer", "compile": False, "options": {}, "status": "ok"}
        about |= {"latency_ms": 9.0, "throughput_img_per_s": 1.0, "peak_memory_mib": 1.0, "macs_g": 1.0}
        return about | {"image_size": [side, side], "device": device}

    here, other = "cpu: x, 1 thread", "cpu: x, 8 threads"
    rows = [row(*each) for side in (224, 384) for each in (("vittt", side, here), ("deit", side, other))]
    efficiency._draw_figures(rows, tmp_path, here)
    assert drawn and all(set(families) == {"vittt"} for families in drawn)

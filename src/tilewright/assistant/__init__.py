"""The optimisation assistant: observe, predict, propose, apply, verify, time, keep or undo, report.

    opt = optimize(model, input_ids, prompts=texts, tokenizer=tokenizer)
    opt.report.save("report.html")

`analyze` observes and proposes, and changes nothing. The module `load` opens a model folder or calls a Python factory;
`view.terminal` prints a report, and `view.html` renders it as a page.
"""

from tilewright.assistant.loop import Optimization, analyze, optimize
from tilewright.assistant.report import Report
from tilewright.assistant.save import apply_changes, save

__all__ = ["Optimization", "Report", "analyze", "apply_changes", "optimize", "save"]

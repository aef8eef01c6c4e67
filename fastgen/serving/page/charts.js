// The drawings of the live view. Their colours are those of the legends beside them.

const byId = (id) => document.getElementById(id);
const font = "11px system-ui, sans-serif";
const AXIS = 34;

/**
 * Bars, a step each, against the budget: up to so many tokens of answers, from there of prompts, from there padding.
 * The scale is logarithmic, as the sizes that steps are run at are: one answer and a whole budget can both be seen.
 */
export function drawSteps(steps, budget) {
  const canvas = byId("steps-chart");
  const { context, width, height } = prepared(canvas);
  const totals = steps.map(([, numPrompt, numAnswer, numPadding]) => numPrompt + numAnswer + numPadding);
  const plot = { left: AXIS, top: 8, bottom: height - 4 };
  const y = (count) => plot.bottom - (count && ((plot.bottom - plot.top) * Math.log2(2 * count)) / Math.log2(2 * budget));
  const ticks = [1, 8, 64, 512, 4096].filter((count) => 2 * count <= budget);
  grid(context, width, [[y(0), ""], ...[...ticks, budget].map((count) => [y(count), String(count)])]);
  const pitch = (width - plot.left) / Math.max(120, steps.length);
  const inks = ["ink-answer", "ink-prompt", "ink-padding"].map(ink);
  steps.forEach(([, numPrompt, numAnswer, numPadding], place) => {
    const left = width - (steps.length - place) * pitch;
    let level = 0;
    [numAnswer, numPrompt, numPadding].forEach((count, which) => {
      if (!count) return;
      context.fillStyle = inks[which];
      context.fillRect(left, y(level + count), Math.max(1, pitch - 0.8), y(level) - y(level + count));
      level += count;
    });
  });
  context.fillStyle = ink("ink-budget");
  context.fillRect(plot.left, Math.round(y(budget)) - 1, width - plot.left, 2);
  const mean = totals.reduce((sum, value) => sum + value, 0) / Math.max(1, totals.length);
  describe(canvas, `Tokens of the last ${steps.length} steps: ${mean.toFixed(1)} a step, at most ${Math.max(0, ...totals)}, of a budget of ${budget}`);
}

/** The quantiles of gaps as they were at each of at most `most` looks, the newest on the right. */
export function drawGaps(history, most) {
  const canvas = byId("gaps-chart");
  const { context, width, height } = prepared(canvas);
  const known = history.filter(Boolean);
  const top = niceAbove(Math.max(1e-4, ...known.map((gaps) => gaps.p99_s)) * 1000);
  const plot = { left: AXIS, top: 8, bottom: height - 4 };
  const y = (seconds) => plot.bottom - ((plot.bottom - plot.top) * 1000 * seconds) / top;
  grid(context, width, [[y(0), ""], [y(top / 2000), String(top / 2)], [y(top / 1000), String(top)]]);
  for (const [name, inkId] of [["p50_s", "ink-p50"], ["p99_s", "ink-p99"]]) {
    context.strokeStyle = ink(inkId);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    let isDown = false;
    history.forEach((gaps, place) => {
      const x = width - 2 - ((history.length - 1 - place) * (width - plot.left - 4)) / (most - 1);
      if (!gaps) isDown = false;
      else if (isDown) context.lineTo(x, y(gaps[name]));
      else context.moveTo(x, y(gaps[name]));
      isDown = Boolean(gaps);
    });
    context.stroke();
  }
  const last = known.at(-1);
  describe(canvas, last ? `Gaps between tokens: half below ${(1000 * last.p50_s).toFixed(1)} ms, 99 in 100 below ${(1000 * last.p99_s).toFixed(1)} ms` : "Gaps between tokens: none yet");
}

/** A cell for each block, or for some, filled from below by those that are held and those that are cached. */
export function drawBlocks({ num_blocks: numBlocks, blocks_per_cell: perCell, held, cached }) {
  const canvas = byId("blocks-chart");
  const numCells = held.length;
  const available = canvas.parentElement.clientWidth;
  const wanted = Math.max(6, Math.min(14, Math.sqrt((available * 110) / numCells)));
  const columns = Math.max(1, Math.floor(available / wanted));
  const pitch = available / columns;
  canvas.style.height = `${Math.round(Math.ceil(numCells / columns) * pitch)}px`;
  const { context } = prepared(canvas);
  const [heldInk, cachedInk, freeInk] = ["ink-held", "ink-cached", "ink-free"].map(ink);
  for (let cell = 0; cell < numCells; cell += 1) {
    const x = Math.round((cell % columns) * pitch);
    const y = Math.round(Math.floor(cell / columns) * pitch);
    const across = Math.round(((cell % columns) + 1) * pitch) - x - 1;
    const side = Math.round((Math.floor(cell / columns) + 1) * pitch) - y - 1;
    const bottom = y + side;
    const inCell = Math.min(perCell, numBlocks - cell * perCell);
    const heldHeight = (side * held[cell]) / inCell;
    const cachedHeight = (side * cached[cell]) / inCell;
    context.fillStyle = freeInk;
    context.fillRect(x, y, across, side);
    context.fillStyle = cachedInk;
    context.fillRect(x, bottom - heldHeight - cachedHeight, across, cachedHeight);
    context.fillStyle = heldInk;
    context.fillRect(x, bottom - heldHeight, across, heldHeight);
  }
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  describe(canvas, `Of ${numBlocks} KV blocks ${total(held)} are held and ${total(cached)} cached`);
}

/** The canvas, cleared, with one unit a CSS pixel. */
function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

function grid(context, width, levels) {
  const style = getComputedStyle(byId("engine"));
  context.font = font;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [y, label] of levels) {
    context.fillStyle = ink("ink-padding");
    context.globalAlpha = 0.5;
    context.fillRect(AXIS, Math.round(y), width - AXIS, 1);
    context.globalAlpha = 1;
    context.fillStyle = style.color;
    context.fillText(label, AXIS - 6, y);
  }
}

/** 1, 2, 5 or 10 times a power of ten. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * 0.999);
}

function ink(id) {
  return getComputedStyle(byId(id)).backgroundColor;
}

function describe(canvas, words) {
  canvas.setAttribute("aria-label", words);
}

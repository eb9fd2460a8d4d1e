// The script of a page (html_page.h): three kinds of charts, then the pictures of each verb.
#include "cli/console/html_page.h"

namespace nvfp4_moe::internal::cli {

constexpr std::string_view kPageScript = R"js(
'use strict';
const report = JSON.parse(document.getElementById('report').textContent);
const pictures = document.getElementById('pictures');
const SVG = 'http://www.w3.org/2000/svg';
let width = 0;

function add(parent, name, attributes, text) {
  const svg = name === 'svg' || parent.namespaceURI === SVG;
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}
// A shape with a tooltip.
function shape(parent, name, attributes, tip) {
  const node = add(parent, name, attributes);
  if (tip) add(node, 'title', {}, tip);
  return node;
}
const number = v => typeof v === 'number' ? v : Infinity;  // the others are not finite
const sum = (rows, key) => rows.reduce((all, row) => all + row[key], 0);
const percent = v => (100 * v).toFixed(v < 0.0995 && v > 0 ? 1 : 0) + ' %';
const unique = values => [...new Set(values)];
function short(v) {
  if (v === 0) return '0';
  if (!isFinite(v)) return 'not finite';
  return v >= 1e-3 && v < 1e6 ? String(+v.toPrecision(3)) : v.toExponential(1).replace('.0', '');
}
function bytes(v) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; v >= 1024 && i < 4; ++i) v /= 1024;
  return v.toFixed(i ? 1 : 0) + ' ' + units[i];
}

// A box with a title, a sentence, and what the colours mean: [class, name] each.
function figure(id, title, note, legend) {
  const box = add(pictures, 'figure', {id});
  add(box, 'h2', {}, title);
  if (note) add(box, 'p', {class: 'note'}, note);
  const names = add(box, 'div', {class: 'legend'});
  for (const [kind, name] of legend || []) {
    const one = add(names, 'span', {});
    add(one, 'i', {class: kind});
    add(one, 'b', {}, name);
  }
  return {box, canvas(wide, high) {
    return add(box, 'svg', {width: wide, height: high, role: 'img', 'aria-label': title});
  }};
}

// Horizontal bars. rows: {label, text, parts: [{value, kind, tip}]}, stacked; most: the track's end.
function bars(on, rows, most) {
  const space = key => 16 + 6.6 * Math.max(...rows.map(row => row[key].length));
  const left = space('label'), room = width - left - space('text');
  const svg = on.canvas(width, rows.length * 26 + 4);
  most = most || Math.max(...rows.map(row => row.parts.reduce((all, p) => all + p.value, 0)));
  rows.forEach((row, i) => {
    const y = i * 26 + 4;
    add(svg, 'text', {x: left - 8, y: y + 14, 'text-anchor': 'end'}, row.label);
    add(svg, 'rect', {class: 'track', x: left, y, width: room, height: 20, rx: 3});
    let x = left;
    for (const part of row.parts) {
      const long = most > 0 ? Math.min(room * part.value / most, left + room - x) : 0;
      shape(svg, 'rect', {class: 'bar ' + part.kind, x, y, width: long, height: 20}, part.tip);
      x += long;
    }
    add(svg, 'text', {class: 'soft', x: left + room + 8, y: y + 14}, row.text);
  });
}

// A heat map. at(row, column): {kind, share (0 to 1: how strong the colour is), tip, text, ring}.
function heat(on, rows, columns, left, at) {
  const high = rows.length > 24 ? 12 : 22;
  const wide = Math.max(4, Math.min(64, (width - left - 10) / columns.length));
  const gap = wide > 8 ? 1 : 0.5;
  const svg = on.canvas(Math.max(width, left + wide * columns.length + 10), rows.length * high + 22);
  const every = Math.ceil(34 / wide);
  columns.forEach((column, c) => {
    if (c % every) return;
    add(svg, 'text', {class: 'soft', x: left + wide * (c + 0.5), y: 12, 'text-anchor': 'middle'},
        column);
  });
  rows.forEach((row, r) => {
    const y = 20 + r * high;
    add(svg, 'text', {x: left - 8, y: y + high / 2 + 4, 'text-anchor': 'end'}, row);
    columns.forEach((column, c) => {
      const {kind, share = 1, tip, text, ring} = at(r, c), x = left + c * wide;
      const size = {x, y, width: wide - gap, height: high - gap};
      if (share < 1) add(svg, 'rect', {class: 'track', ...size});
      shape(svg, 'rect', {class: 'cell ' + kind, ...size, 'fill-opacity': share}, tip);
      if (ring) add(svg, 'rect', {class: 'ring', ...size, 'pointer-events': 'none'});
      if (text && wide >= 40) add(svg, 'text', {x: x + wide / 2, y: y + high / 2 + 4,
          'text-anchor': 'middle', 'pointer-events': 'none'}, text);
    });
  });
}

// Points on a logarithmic y axis. series: {kind, line: class of the line or '', points: [x, y, tip,
// least]}; with least a bar from there to y. xs: the columns, in order. A y of 0 is on the axis.
function plot(on, series, xs, title) {
  const left = 70, top = 22, high = 260, room = width - left - 20;
  const svg = on.canvas(width, top + high + 44);
  const all = series.flatMap(s => s.points.flatMap(p => [p[1], p[3]])).filter(v => v > 0 && v < 1e300);
  let low = Math.floor(Math.log10(Math.min(...all)) - 0.05);
  let end = Math.ceil(Math.log10(Math.max(...all)) + 0.05);
  if (!all.length) [low, end] = [-1, 0];
  const yOf = v => top + high * (v > 0 ? Math.max(0, 1 - (Math.log10(v) - low) / (end - low)) : 1);
  const xOf = x => left + room * (xs.indexOf(x) + 0.5) / xs.length;
  const step = Math.ceil((end - low) / 8), fine = end - low < 3 ? [1, 2, 5] : [1];
  for (let e = low; e <= end; e += step) {
    for (const m of fine) {
      const value = m * 10 ** e, y = yOf(value);
      if (y < top - 1) continue;
      add(svg, 'line', {class: 'grid', x1: left, x2: left + room, y1: y, y2: y});
      add(svg, 'text', {class: 'soft', x: left - 8, y: y + 4, 'text-anchor': 'end'}, short(value));
    }
  }
  const every = Math.ceil(40 * xs.length / room);
  xs.forEach((x, i) => {
    if (i % every === 0) add(svg, 'text', {class: 'soft', x: xOf(x), y: top + high + 18,
        'text-anchor': 'middle'}, String(x));
  });
  add(svg, 'text', {class: 'soft', x: left + room / 2, y: top + high + 38,
      'text-anchor': 'middle'}, title);
  for (const s of series) {
    const ys = s.points.map(p => [xOf(p[0]), yOf(p[1])]);
    if (s.line) {
      const ends = ys.length === 1 ? [[ys[0][0] - 24, ys[0][1]], [ys[0][0] + 24, ys[0][1]]] : ys;
      add(svg, 'polyline', {class: `path ${s.line} ${s.kind}`, points: ends.join(' ')});
    }
    s.points.forEach((p, i) => {
      const [x, y] = ys[i];
      if (p[3] !== undefined) shape(svg, 'rect', {class: 'bar ' + s.kind, x: x - 3, y, width: 6,
          height: Math.max(3, yOf(p[3]) - y), rx: 2}, p[2]);
      else if (s.line !== 'dash') shape(svg, 'circle', {class: 'dot ' + s.kind, cx: x, cy: y, r: 4},
          p[2]);
    });
  }
}

function inspect() {
  const read = report.layer_statistics || [], fit = report.fit || [];
  const parts = read.length ? [['codes', sum(read, 'codes_bytes')],
                               ['block scales', sum(read, 'scales_bytes')]] : [];
  if (fit.length) parts.push(['not experts', fit[0].other_bytes]);
  const rest = report.size_bytes - parts.reduce((all, part) => all + part[1], 0);
  parts.push([!fit.length ? 'other' : read.length ? 'rest of the experts' : 'experts', rest]);
  bars(figure('parts', 'Bytes by part', bytes(report.size_bytes) + ' of tensors. Codes and block ' +
      'scales are those of the layers that were read.'),
      parts.map(([label, value], i) => ({label, text: bytes(value) + ', ' +
          percent(value / report.size_bytes), parts: [{value, kind: 's' + i, tip: value + ' bytes'}]})),
      report.size_bytes);

  const found = report.findings.filter(f => f.layer !== null);
  const layers = unique([...read, ...found].map(x => x.layer)
      .concat(report.activations.flatMap(a => a.layers))).sort((a, b) => a - b);
  const kinds = {error: 'error', warning: 'warn', note: 's0'}, order = Object.keys(kinds);
  const at = {};  // "layer expert" -> its findings; expert -1: the layer's own
  for (const f of found) (at[f.layer + ' ' + (f.expert ?? -1)] ||= []).push(f);
  const experts = [...Array(report.num_experts).keys()];
  heat(figure('experts', 'Findings by layer and expert', 'Column "all": findings of a whole layer. ' +
      'A finding that stands for several is at the first expert that has it. ' +
      (report.findings.length - found.length) + ' more are of the whole model.',
      [['error', 'error'], ['warn', 'warning'], ['s0', 'note'], ['none', 'nothing found']]),
      layers.map(layer => 'layer ' + layer), ['all', ...experts], 90, (r, c) => {
        const here = (at[layers[r] + ' ' + (c - 1)] || []);
        const worst = order.find(severity => here.some(f => f.severity === severity));
        const where = 'layer ' + layers[r] + (c ? ', expert ' + (c - 1) : '');
        return {kind: worst ? kinds[worst] : 'none', tip: where + ': ' + (here.map(f =>
            `${f.severity} ${f.id} (${f.count}): ${f.tensor}: expected ${f.expected}, got ${f.actual}`)
            .join('\n') || 'nothing found')};
      });

  const ranges = [['tensor_scale', 'tensor scale'], ['input_scale', 'input scale']]
      .map(([key, name], i) => ({name, kind: 's' + i, line: '', points: read.filter(l => l[key])
          .map(l => [l.layer, l[key][1], `layer ${l.layer}, ${name}: ${short(l[key][0])} to ` +
              short(l[key][1]), l[key][0]])})).filter(s => s.points.length);
  if (ranges.length) plot(figure('scales', 'Scales by layer', 'From the smallest to the largest.',
      ranges.map(s => [s.kind, s.name])), ranges, read.map(l => l.layer), 'layer');

  const of = [['experts_bytes', 'experts'], ['other_bytes', 'other tensors'],
              ['workspace_bytes', 'workspace']];
  if (fit.length) bars(figure('fit', 'Bytes on each GPU', 'Under expert parallel, with a workspace ' +
      'for ' + report.fit_max_tokens + ' tokens; without KV cache and other activations.',
      of.map(([, name], i) => ['s' + i, name])), fit.map(row => ({
        label: row.ranks + (row.ranks > 1 ? ' GPUs' : ' GPU'),
        text: bytes(row.total_bytes) + '; fits ' + (Object.keys(row).filter(k =>
            k.startsWith('fits_') && row[k]).map(k => k.slice(5, -2)).join(', ') || 'none') + ' GB',
        parts: of.map(([key, name], i) => ({value: row[key], kind: 's' + i,
            tip: name + ': ' + bytes(row[key])}))})));
}

function verify() {
  const layers = report.details ? report.details.layers : [], run = layers.filter(l => l.run);
  const curve = (rows, kind, line, name, value) => ({kind, line, name, points: rows.map(l =>
      [l.layer, number(value(l)), `layer ${l.layer}, ${name}: ${short(number(value(l)))}`])});
  const errors = run.length ? [
    curve(run, 's0', 'solid', 'relative L2', l => l.run.relative_l2),
    curve(run, 's1', 'solid', 'worst token', l => l.run.worst_token_l2),
    curve(run, 's0', 'dash', 'limit of L2', l => l.run.limit_relative_l2),
    curve(run, 's1', 'dash', 'limit of a token', l => l.run.limit_worst_token_l2),
  ] : report.ranks ? [curve(report.checks || [], 's0', 'solid', 'relative L2', l => l.relative_l2)] : [];
  if (errors.length) plot(figure('errors', 'Error of each layer', (report.ranks ? 'Over ' +
      report.ranks + ' ranks against one rank. ' : 'Against the exact reference. ') +
      'A dashed line is a limit; an error of 0 is on the axis.', errors.filter(s => s.line !== 'dash')
      .map(s => [s.kind, s.name])), errors, unique(errors[0].points.map(p => p[0])), 'layer');

  const original = layers.filter(l => l.original), numbers = rows => rows.map(l => l.layer);
  if (original.length) heat(figure('sqnr', 'Signal to quantization noise against the original, dB',
      'The stronger the colour, the smaller the error: from 10 to 30 dB.'),
      ['gate', 'up', 'down', 'layer'], numbers(original), 190, (r, c) => {
        const key = ['gate_sqnr_db', 'up_sqnr_db', 'down_sqnr_db', 'sqnr_db'][r];
        const v = original[c].original[key];
        return {kind: 's0', share: v === null ? 1 : Math.max(0.05, Math.min(0.99, (v - 10) / 20)),
                text: v === null ? '\u221e' : v.toFixed(1),
                tip: `layer ${original[c].layer}: ${v === null ? 'nothing lost' : v + ' dB'}`};
      });

  const counts = report.saturation || [], kinds = [
    ['hidden, at 448', 'hidden_saturated', 'hidden_blocks'],
    ['hidden, to zero', 'hidden_zeroed', 'hidden_blocks'],
    ['intermediate, at 448', 'intermediate_saturated', 'intermediate_blocks'],
    ['intermediate, to zero', 'intermediate_zeroed', 'intermediate_blocks'],
  ];
  if (counts.some(l => l.hidden_blocks !== null)) heat(figure('saturation', 'Saturation by layer',
      'Share of activation blocks whose scale is limited at 448 or rounds to zero.',
      [['s1', 'some, at the strongest all'], ['none', 'none']]), kinds.map(k => k[0]),
      numbers(counts), 190, (r, c) => {
        const [name, key, of] = kinds[r], share = counts[c][of] ? counts[c][key] / counts[c][of] : 0;
        return {kind: share ? 's1' : 'none', share: share ? 0.2 + 0.8 * share : 1,
                text: percent(share), tip: `layer ${counts[c].layer}, ${name}: ` +
                    `${counts[c][key]} of ${counts[c][of]} blocks`};
      });

  const most = Math.max(0, ...layers.map(l => l.num_experts)), at = {};
  for (const l of layers) for (const check of [l.packed, l.original]) for (const f of check?.faults || [])
    (at[l.layer + ' ' + f.expert] ||= []).push(f);
  if (layers.some(l => l.packed || l.original)) heat(figure('faults', 'Weights by layer and expert',
      'Faults against the file\'s bytes and the original; the text lists the first of many. ' +
      (original.length ? 'A frame: the largest error of its layer.' : ''),
      [['error', 'fault'], ['none', 'no fault']]), layers.map(l => 'layer ' + l.layer),
      [...Array(most).keys()], 90, (r, c) => {
        const l = layers[r], faults = at[l.layer + ' ' + c] || [];
        return {kind: faults.length ? 'error' : 'none', ring: l.original && l.original.max_expert === c,
                tip: `layer ${l.layer}, expert ${c}: ` + (faults.map(f => `${f.tensor} (${f.row}, ` +
                    `${f.col}) ${f.what}: expected ${f.expected}, got ${f.actual}`).join('\n') ||
                    'no fault')};
      });
}

function bench() {
  const timed = (report.timings || []).filter(t => t.median_us !== null);
  const name = t => [t.backend, t.activation_format, t.over, t.combine, t.routing, t.placement]
      .filter(x => x).join(' ');
  const names = unique(timed.map(name)), kind = t => 's' + names.indexOf(name(t)) % 6;
  const tokens = unique(timed.map(t => t.tokens)).sort((a, b) => a - b);
  if (!timed.length) return;
  if (!report.ranks) {
    const of = (t, key, line, what) => ({kind: kind(t), line, points: timed.filter(o => name(o) ===
        name(t)).map(o => [o.tokens, o[key], `${name(o)}, ${o.tokens} tokens: ${short(o[key])} us` +
        what])});
    const firsts = names.map(n => timed.find(t => name(t) === n));
    plot(figure('times', 'Time of a layer, us', 'A dashed line is the floor: the larger of bytes over ' +
        'read rate and operations over peak.', firsts.map(t => [kind(t), name(t)])),
        [...firsts.map(t => of(t, 'floor_us', 'dash', '')),
         ...firsts.map(t => of(t, 'median_us', 'solid', ', median'))], tokens, 'tokens');
    bars(figure('shares', 'Share of the nearest limit', 'Which limit is nearest: reading the weights, ' +
        'or a peak of arithmetic. It can pass 100 % on a shared machine.'), timed.map(t => ({
          label: `${name(t)}, ${t.tokens}`, text: `${percent(t.limit_share)} of ${t.limit}`,
          parts: [{value: t.limit_share, kind: kind(t), tip: short(t.median_us) + ' us'}]})), 1);
  } else {
    for (const count of tokens) bars(figure('times-' + count, `Time of a layer, ${count} tokens`,
        'Over ' + report.ranks + ' ranks; all begin together, and the slowest counts.'),
        timed.filter(t => t.tokens === count).map(t => ({
          label: [t.routing, t.combine, t.over, t.placement].filter(x => x).join(' '),
          text: short(t.median_us) + ' us' + (t.times_one_rank ? ', ' + short(t.times_one_rank) +
              ' times one rank' : ''),
          parts: [{value: t.median_us, kind: t.combine === 'one_rank' ? 's4' : 's0',
                   tip: name(t)}]})));
  }
  const steps = report.steps || [], stepNames = unique(steps.map(s => s.step));
  if (steps.length) bars(figure('steps', 'Time of each step', 'Taken one at a time.',
      stepNames.map((step, i) => ['s' + i, step])), timed.map(t => {
        const own = steps.filter(s => name(s) === name(t) && s.tokens === t.tokens);
        return {label: `${name(t)}, ${t.tokens}`, text: short(sum(own, 'median_us')) + ' us',
                parts: own.map(s => ({value: s.share, kind: 's' + stepNames.indexOf(s.step),
                    tip: `${s.step}: ${short(s.median_us)} us, ${percent(s.share)}`}))};
      }), 1);
}

function draw() {
  const wide = Math.max(640, pictures.clientWidth - 36);
  if (wide === width) return;
  width = wide;
  pictures.replaceChildren();
  ({inspect, verify, bench})[report.verb]();
}
draw();
addEventListener('resize', draw);
)js";

constexpr std::string_view kPageScriptHash = "";

}  // namespace nvfp4_moe::internal::cli

// A line without axes: how a figure went.

const NAMESPACE = "http://www.w3.org/2000/svg";
const HEIGHT = 28;

/** Draw values at the right end of a line with room for `room` of them; its height is `top`. */
export function drawSparkline(svg, values, room, top = Math.max(...values) || 1) {
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${room - 1} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["area", "line"]) {
      svg.appendChild(document.createElementNS(NAMESPACE, "path")).setAttribute("class", name);
    }
  }
  const left = room - values.length;
  const points = values.map((value, i) => `${left + i},${(HEIGHT - 1 - (HEIGHT - 3) * (value / top)).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  const [area, stroke] = svg.children;
  area.setAttribute("d", `${line}L${room - 1},${HEIGHT}L${left},${HEIGHT}Z`);
  stroke.setAttribute("d", line);
}

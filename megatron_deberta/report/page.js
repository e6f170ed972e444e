"use strict";
// Shows the values of a chart at the pointer.
for (const figure of document.querySelectorAll("figure")) {
  const { box, x, percent, series } = JSON.parse(figure.querySelector("script").textContent);
  const picture = figure.querySelector(".picture");
  const line = figure.querySelector(".line");
  const values = figure.querySelector(".values");
  const show = (value) =>
    percent ? (100 * value).toFixed(1) + "%" : value.toLocaleString("en", { maximumSignificantDigits: 5 });
  const nearest = (points, place) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < place) low = middle;
      else high = middle;
    }
    return Math.abs(points[low][0] - place) <= Math.abs(points[high][0] - place) ? points[low] : points[high];
  };
  const leave = () => {
    line.hidden = true;
    values.textContent = "";
  };
  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect();
    const share = ((event.clientX - bounds.left) / bounds.width - box[0]) / (box[2] - box[0]);
    if (!series.length || share < 0 || share > 1) return leave();
    const place = x[0] + share * (x[1] - x[0]);
    line.hidden = false;
    line.style.left = event.clientX - bounds.left + "px";
    line.style.top = box[1] * bounds.height + "px";
    line.style.height = (box[3] - box[1]) * bounds.height + "px";
    values.textContent = "";
    for (const each of series) {
      const [at, value] = nearest(each.points, place);
      const item = document.createElement("span");
      item.className = "k" + each.color;
      const name = series.length > 1 ? each.name + " " : "";
      item.textContent = `${name}${show(value)} at ${at.toLocaleString("en", { maximumSignificantDigits: 6 })}   `;
      values.append(item);
    }
  });
  picture.addEventListener("pointerleave", leave);
}

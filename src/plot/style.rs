//! Colours, the marks a figure is made of, and the one place that draws and saves them.
//!
//! A figure is a list of [`Mark`]s on a fixed page, so that the SVG and the PNG cannot differ. The PNG is drawn at
//! twice its size and averaged down: plotters does not smooth thick lines.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Once;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::{Error, Result};

/// Page of every figure, in points of the SVG and pixels of the PNG.
pub const WIDTH: u32 = 1600;
pub const HEIGHT: u32 = 1000;

/// How much larger than the page the PNG is drawn before it is averaged down.
const OVERSAMPLE: u32 = 2;

/// The first name is what an SVG viewer looks for; the embedded font is registered under the whole string.
const FONT: &str = "DejaVu Sans, Verdana, sans-serif";
static FONT_FILE: &[u8] = include_bytes!("DejaVuSans.ttf");

/// Both backends hang text a little above its middle: by this part of its size.
const SINK: f64 = 0.1;

pub const INK: RGBColor = RGBColor(33, 37, 41);
pub const FAINT: RGBColor = RGBColor(108, 117, 125);
pub const GRID: RGBColor = RGBColor(226, 229, 233);
pub const PAPER: RGBColor = RGBColor(255, 255, 255);

pub type Point = (f64, f64);

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    Circle,
    Square,
    Diamond,
    Triangle,
    Cross,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Align {
    Left,
    Middle,
    Right,
}

/// What a figure is made of. Text hangs vertically centred on its point.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    Rect { from: Point, to: Point, color: RGBColor },
    Line { points: Vec<Point>, color: RGBColor, width: f64, dash: Option<(f64, f64)> },
    Marker { shape: Shape, at: Point, radius: f64, color: RGBColor, filled: bool },
    Text { at: Point, text: String, size: f64, color: RGBColor, align: Align, upright: bool },
}

impl Mark {
    pub fn text(at: Point, text: impl ToString, size: f64, color: RGBColor, align: Align) -> Mark {
        Mark::Text { at, text: text.to_string(), size, color, align, upright: false }
    }

    /// A line of text that begins there, as small as it has to be to end on the page.
    pub fn fitting(at: Point, text: impl ToString, size: f64, color: RGBColor) -> Mark {
        let text = text.to_string();
        // In whole sentences there is much that is narrow.
        let size = size.min(1.28 * fitting_size(&text, f64::from(WIDTH) - 20.0 - at.0));
        Mark::Text { at, text, size, color, align: Align::Left, upright: false }
    }

    pub fn line(points: &[Point], color: RGBColor, width: f64) -> Mark {
        Mark::Line { points: points.to_vec(), color, width, dash: None }
    }
}

/// The mark of a bar that goes on beyond the page: a gap between two strokes, `half` of a bar's width to each side of `at`.
pub fn break_of((x, y): Point, half: f64, upright: bool) -> [Mark; 3] {
    let stroke = |along: f64, color, width| {
        let ends = match upright {
            true => [(x - half, y + along + 4.0), (x + half, y + along - 4.0)],
            false => [(x + along - 4.0, y + half), (x + along + 4.0, y - half)],
        };
        Mark::line(&ends, color, width)
    };
    [stroke(0.0, PAPER, 7.0), stroke(-4.0, INK, 1.2), stroke(4.0, INK, 1.2)]
}

/// The size at which a text is so wide: a letter is about 0.6 of its size.
pub fn fitting_size(text: &str, width: f64) -> f64 {
    width / (0.6 * text.chars().count().max(1) as f64)
}

/// The colour a fraction `at` (0..=1) of the way along a ramp of colours.
pub fn ramp(stops: &[RGBColor], at: f64) -> RGBColor {
    let along = at.clamp(0.0, 1.0) * (stops.len() - 1) as f64;
    let low = (along as usize).min(stops.len().saturating_sub(2));
    let (a, b, t) = (stops[low], stops[(low + 1).min(stops.len() - 1)], along - low as f64);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * t).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// Labels of lengths are no smaller.
const SMALLEST: f64 = 8.4;

/// Of lengths and where their labels stand those whose labels have room beside each other, and their size: all, if they
/// have it in a smaller size, the largest that will do; else powers of two first.
pub fn with_room(places: &[(u64, f64)], size: f64) -> (BTreeSet<u64>, f64) {
    let fits = |size: f64| {
        let half = |length: u64| 0.31 * size * short(length).len() as f64 + 1.0;
        let mut order = places.to_vec();
        order.sort_by_key(|(length, _)| (!length.is_power_of_two(), *length));
        let mut kept: Vec<(u64, f64)> = vec![];
        for (length, x) in order {
            if kept.iter().all(|&(other, at)| (x - at).abs() >= half(length) + half(other)) {
                kept.push((length, x));
            }
        }
        kept
    };
    let mut sizes = (0..).map(|i| size - 0.3 * f64::from(i)).take_while(|size| *size >= SMALLEST);
    let size = sizes.find(|size| fits(*size).len() == places.len()).unwrap_or(size);
    (fits(size).into_iter().map(|(length, _)| length).collect(), size)
}

/// 8K is 8192: the words of context lengths.
pub fn short(n: u64) -> String {
    match n {
        n if n > 0 && n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if n > 0 && n.is_multiple_of(1 << 10) => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}

/// Writes `<stem>.svg` and `<stem>.png` into `dir`, which is made where it is missing.
pub fn save(marks: &[Mark], dir: &Path, stem: &str) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let (svg, png) = (dir.join(format!("{stem}.svg")), dir.join(format!("{stem}.png")));
    let text = to_svg(marks).map_err(drawing(&svg))?;
    std::fs::write(&svg, text).map_err(Error::io(&svg))?;
    write_png(&to_pixels(marks).map_err(drawing(&png))?, &png)?;
    Ok(vec![svg, png])
}

fn drawing(path: &Path) -> impl FnOnce(String) -> Error {
    let path = path.to_path_buf();
    move |why| Error::Io { path, source: std::io::Error::other(why) }
}

fn to_svg(marks: &[Mark]) -> std::result::Result<String, String> {
    let mut text = String::new();
    draw(&SVGBackend::with_string(&mut text, (WIDTH, HEIGHT)).into_drawing_area(), marks, 1.0)?;
    Ok(text)
}

/// The page as RGB bytes, row by row.
fn to_pixels(marks: &[Mark]) -> std::result::Result<Vec<u8>, String> {
    let (w, h) = (WIDTH * OVERSAMPLE, HEIGHT * OVERSAMPLE);
    let mut large = vec![255; (w * h * 3) as usize];
    let area = BitMapBackend::with_buffer(&mut large, (w, h)).into_drawing_area();
    draw(&area, marks, f64::from(OVERSAMPLE))?;
    drop(area);
    Ok(average_down(&large, OVERSAMPLE as usize))
}

/// Mean of each `by` x `by` square of pixels.
fn average_down(large: &[u8], by: usize) -> Vec<u8> {
    let (width, square) = (WIDTH as usize, (by * by) as u32);
    let mut small = Vec::with_capacity(width * HEIGHT as usize * 3);
    let mut sums = vec![0u32; width * 3];
    for rows in large.chunks_exact(width * by * 3 * by) {
        sums.fill(0);
        for row in rows.chunks_exact(width * by * 3) {
            for (sums, pixels) in sums.chunks_exact_mut(3).zip(row.chunks_exact(by * 3)) {
                for pixel in pixels.chunks_exact(3) {
                    sums.iter_mut().zip(pixel).for_each(|(sum, &channel)| *sum += u32::from(channel));
                }
            }
        }
        small.extend(sums.iter().map(|sum| (sum / square) as u8));
    }
    small
}

fn write_png(pixels: &[u8], path: &Path) -> Result<()> {
    let area = BitMapBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
    let image = BitMapElement::with_ref((0, 0), (WIDTH, HEIGHT), pixels).expect("pixels of a whole page");
    let done = area.draw(&image).and_then(|()| area.present());
    done.map_err(|e| drawing(path)(e.to_string()))
}

fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let fits = register_font(FONT, FontStyle::Normal, FONT_FILE).is_ok();
        assert!(fits, "DejaVuSans.ttf is not a font");
    });
}

fn draw<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    marks: &[Mark],
    scale: f64,
) -> std::result::Result<(), String> {
    register();
    let failed = |e: DrawingAreaErrorKind<DB::ErrorType>| e.to_string();
    area.fill(&PAPER).map_err(failed)?;
    marks.iter().try_for_each(|mark| Canvas { area, scale }.mark(mark)).map_err(failed)?;
    area.present().map_err(failed)
}

/// A drawing area whose unit is a point of the page.
struct Canvas<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    scale: f64,
}

type Drawn<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

impl<DB: DrawingBackend> Canvas<'_, DB> {
    fn px(&self, (x, y): Point) -> (i32, i32) {
        ((x * self.scale).round() as i32, (y * self.scale).round() as i32)
    }

    fn length(&self, points: f64) -> u32 {
        (points * self.scale).round().max(1.0) as u32
    }

    fn mark(&self, mark: &Mark) -> Drawn<DB> {
        match mark {
            Mark::Rect { from, to, color } => {
                self.area.draw(&Rectangle::new([self.px(*from), self.px(*to)], color.filled()))
            }
            Mark::Line { points, color, width, dash } => self.line(points, *color, *width, *dash),
            Mark::Marker { shape: Shape::Cross, at, radius, color, .. } => self.cross(*at, *radius, *color),
            Mark::Marker { shape, at, radius, color, filled } => self.marker(*shape, *at, *radius, *color, *filled),
            Mark::Text { at, text, size, color, align, upright } => {
                let h = match align {
                    Align::Left => HPos::Left,
                    Align::Middle => HPos::Center,
                    Align::Right => HPos::Right,
                };
                let turn = if *upright { FontTransform::Rotate270 } else { FontTransform::None };
                let font = (FONT, size * self.scale).into_font().transform(turn);
                let style = TextStyle::from(font).color(color).pos(Pos::new(h, VPos::Center));
                self.area.draw_text(text, &style, self.px((at.0, at.1 + SINK * size)))
            }
        }
    }

    fn line(&self, points: &[Point], color: RGBColor, width: f64, dash: Option<(f64, f64)>) -> Drawn<DB> {
        let style = color.stroke_width(self.length(width));
        let points: Vec<_> = points.iter().map(|&p| self.px(p)).collect();
        match dash {
            None => self.area.draw(&PathElement::new(points, style)),
            Some((on, off)) => {
                self.area.draw(&DashedPathElement::new(points, self.length(on), self.length(off), style))
            }
        }
    }

    fn cross(&self, (x, y): Point, r: f64, color: RGBColor) -> Drawn<DB> {
        for end in [(r, r), (r, -r)] {
            self.line(&[(x - end.0, y - end.1), (x + end.0, y + end.1)], color, 1.5, None)?;
        }
        Ok(())
    }

    /// A hollow marker is the filled one with a smaller one of paper inside: outlines of one width for all shapes.
    fn marker(&self, shape: Shape, at: Point, radius: f64, color: RGBColor, filled: bool) -> Drawn<DB> {
        // A rim of paper keeps markers apart where lines meet.
        self.solid(shape, at, radius + 1.2, PAPER)?;
        self.solid(shape, at, radius, color)?;
        if filled { Ok(()) } else { self.solid(shape, at, radius - 2.2, PAPER) }
    }

    fn solid(&self, shape: Shape, at: Point, r: f64, color: RGBColor) -> Drawn<DB> {
        let corners: &[Point] = match shape {
            Shape::Circle => {
                return self.area.draw(&Circle::new(self.px(at), self.length(r) as i32, color.filled()));
            }
            Shape::Square | Shape::Cross => &[(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
            Shape::Diamond => &[(0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0)],
            Shape::Triangle => &[(0.0, -1.2), (1.1, 0.85), (-1.1, 0.85)],
        };
        let corners: Vec<_> = corners.iter().map(|c| self.px((at.0 + c.0 * r, at.1 + c.1 * r))).collect();
        self.area.draw(&Polygon::new(corners, color.filled()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Labels that would touch in the usual size are a little smaller, and not as small as can be.
    #[test]
    fn labels_are_as_large_as_there_is_room() {
        let apart = |apart: f64| (13..21).map(|log| (1 << log, apart * f64::from(log))).collect::<Vec<(u64, f64)>>();
        let (named, size) = with_room(&apart(34.0), 13.0);
        assert!(named.len() == 8 && (12.0..13.0).contains(&size), "{size}");
        assert_eq!(with_room(&apart(60.0), 13.0), (apart(60.0).iter().map(|(length, _)| *length).collect(), 13.0));
        let (named, size) = with_room(&apart(15.0), 13.0);
        assert!(named.len() < 8 && size == 13.0, "{named:?} {size}");
    }

    #[test]
    fn a_ramp_goes_through_its_stops() {
        let stops = [RGBColor(0, 0, 0), RGBColor(100, 0, 0), RGBColor(100, 200, 0)];
        assert_eq!(
            [0.0, 0.5, 0.75, 1.0].map(|t| ramp(&stops, t)),
            [stops[0], stops[1], RGBColor(100, 100, 0), stops[2]]
        );
        assert_eq!(ramp(&stops[..1], 0.7), stops[0]);
    }

    #[test]
    fn marks_land_where_they_are_put() {
        let green = RGBColor(0, 128, 0);
        let marks = [Mark::Rect { from: (100.0, 50.0), to: (200.0, 80.0), color: green }];
        let pixels = to_pixels(&marks).unwrap();
        let at = |x: usize, y: usize| &pixels[(y * WIDTH as usize + x) * 3..][..3];
        assert_eq!((at(150, 60), at(150, 100), at(90, 60)), (&[0, 128, 0][..], &[255; 3][..], &[255; 3][..]));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = save(&[], &file.path().join("sub"), "x").unwrap_err().to_string();
        assert!(message.contains("sub"), "{message}");
    }
}

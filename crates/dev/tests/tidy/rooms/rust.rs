//! Which file of a crate uses which other, by the paths in its tokens.
//!
//! A path leads to the file that defines what it names, through every re-export on the way. What
//! only re-exports is a signpost and draws no arrow. Unit tests are left out. Methods are not
//! seen: they need no path.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use super::graph::Graph;
use crate::tree::File;

/// `use` declarations lead on at most so often: one of a foreign crate leads to itself.
const HOPS_MAX: usize = 16;

/// Items that have a name in their module.
const ITEMS: [&str; 8] = [
    "fn", "struct", "enum", "union", "trait", "type", "const", "static",
];

type Path = Vec<String>;

/// A path of more than one name in the code, and its line.
struct Use {
    path: Path,
    line: usize,
}

struct Import {
    name: String,
    path: Path,
    line: usize,
    /// A signpost for others.
    public: bool,
}

struct Module {
    file: String,
    /// Where its children's files lie.
    folder: String,
    parent: usize,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    imports: Vec<Import>,
    uses: Vec<Use>,
    /// Single names in the code.
    words: BTreeSet<String>,
}

/// Where a path leads.
#[derive(Clone, Copy)]
enum Found {
    Module(usize),
    /// An item of this module.
    Item(usize),
}

impl Found {
    fn module(self) -> usize {
        let (Found::Module(module) | Found::Item(module)) = self;
        module
    }
}

/// A crate's modules; the first is its root.
struct Crate<'a> {
    files: &'a [File],
    modules: Vec<Module>,
}

/// Arrows between the files below `src`, which ends in a slash. Names are relative to it.
pub(crate) fn arrows(files: &[File], src: &str) -> Graph {
    let mut found = Crate {
        files,
        modules: Vec::new(),
    };
    found.read(&format!("{src}lib.rs"), src.to_owned(), 0);
    let mut graph = Graph::default();
    for module in 0..found.modules.len() {
        found.draw(module, src, &mut graph);
    }
    graph
}

impl Crate<'_> {
    /// Reads a module's file; nothing when there is none.
    fn read(&mut self, path: &str, folder: String, parent: usize) -> Option<usize> {
        let file = self.files.iter().find(|file| file.path == path)?;
        let tokens: TokenStream = file
            .text
            .parse()
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        Some(self.enter(path.to_owned(), folder, parent, tokens))
    }

    fn enter(&mut self, file: String, folder: String, parent: usize, code: TokenStream) -> usize {
        let module = self.modules.len();
        self.modules.push(Module {
            file,
            folder,
            parent,
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            imports: Vec::new(),
            uses: Vec::new(),
            words: BTreeSet::new(),
        });
        self.scan(module, code, true);
        module
    }

    /// Takes what a run of tokens declares and uses; items count only at the top of a module.
    fn scan(&mut self, module: usize, code: TokenStream, top: bool) {
        let tokens: Vec<TokenTree> = code.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            let name = word(&tokens, at);
            at = match (&tokens[at], name.as_deref()) {
                (TokenTree::Group(group), _) => {
                    self.scan(module, group.stream(), false);
                    at + 1
                }
                (TokenTree::Punct(punct), _) if punct.as_char() == '#' => attribute(&tokens, at),
                (_, Some("use")) if !is(&tokens, at + 1, '<') => self.import(module, &tokens, at),
                (_, Some("mod")) if word(&tokens, at + 1).is_some() => {
                    self.child(module, &tokens, at)
                }
                (_, Some(_)) => self.name(module, &tokens, at, top),
                _ => at + 1,
            };
        }
    }

    /// `mod name;` or `mod name { … }`.
    fn child(&mut self, module: usize, tokens: &[TokenTree], at: usize) -> usize {
        let name = word(tokens, at + 1).unwrap_or_default();
        let here = &self.modules[module];
        let (file, folder) = (here.file.clone(), here.folder.clone());
        let inner = format!("{folder}{name}/");
        let child = match tokens.get(at + 2) {
            Some(TokenTree::Group(code)) => Some(self.enter(file, inner, module, code.stream())),
            _ => self
                .read(&format!("{folder}{name}.rs"), inner.clone(), module)
                .or_else(|| self.read(&format!("{inner}mod.rs"), inner.clone(), module)),
        };
        if let Some(child) = child {
            self.modules[module].children.insert(name, child);
        }
        at + 3
    }

    /// `use …;`
    fn import(&mut self, module: usize, tokens: &[TokenTree], at: usize) -> usize {
        let end = (at..tokens.len())
            .find(|&end| is(tokens, end, ';'))
            .unwrap_or(tokens.len());
        let before = at.checked_sub(1).map(|before| &tokens[before]);
        let public = match before {
            Some(TokenTree::Group(_)) => at > 1 && word(tokens, at - 2).as_deref() == Some("pub"),
            _ => at > 0 && word(tokens, at - 1).as_deref() == Some("pub"),
        };
        let mut leaves = Vec::new();
        leaf(&tokens[at + 1..end], &mut Vec::new(), &mut leaves);
        let line = tokens[at].span().start().line;
        let imports = leaves.into_iter().map(|(name, path)| Import {
            name,
            path,
            line,
            public,
        });
        self.modules[module].imports.extend(imports);
        end + 1
    }

    /// A name, or several with `::` between them.
    fn name(&mut self, module: usize, tokens: &[TokenTree], at: usize, top: bool) -> usize {
        let line = tokens[at].span().start().line;
        let here = &mut self.modules[module];
        let mut path: Path = word(tokens, at).into_iter().collect();
        let mut end = at + 1;
        while is_colons(tokens, end) {
            let Some(name) = word(tokens, end + 2) else {
                break;
            };
            path.push(name);
            end += 3;
        }
        // Fields, methods, and what follows a type in angle brackets.
        let inner = at > 0 && (is(tokens, at - 1, '.') || is(tokens, at - 1, ':'));
        let inner = inner && (is(tokens, at - 1, '.') || at > 1 && is_colons(tokens, at - 2));
        if path.len() > 1 && !inner {
            here.uses.push(Use { path, line });
        } else if path.len() == 1 && !inner {
            let declares = ITEMS.contains(&path[0].as_str());
            let declared = match path[0].as_str() {
                "macro_rules" => word(tokens, at + 2),
                _ => word(tokens, at + 1).filter(|_| declares),
            };
            if let Some(name) = declared.filter(|_| top) {
                here.items.insert(name);
                return at + 2;
            }
            here.words.extend(path);
        }
        end
    }

    /// What a name stands for in a module.
    fn look(&self, module: usize, name: &str, last: bool, hops: usize) -> Option<Found> {
        let here = &self.modules[module];
        let item = || here.items.contains(name).then_some(Found::Item(module));
        let child = || here.children.get(name).copied().map(Found::Module);
        let own = if last {
            item().or_else(child)
        } else {
            child().or_else(item)
        };
        let named = here.imports.iter().filter(|import| import.name == name);
        let mut named = named.filter_map(|import| self.lead(module, &import.path, hops));
        let globs = here.imports.iter().filter(|import| import.name == "*");
        let mut globs = globs.filter_map(|import| match self.lead(module, &import.path, hops)? {
            Found::Module(other) if hops > 0 && other != module => {
                self.look(other, name, last, hops - 1)
            }
            _ => None,
        });
        own.or_else(|| named.next()).or_else(|| globs.next())
    }

    /// Where a path leads from a module; nothing when it leaves the crate.
    fn lead(&self, module: usize, path: &[String], hops: usize) -> Option<Found> {
        let hops = hops.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        let mut found = match first.as_str() {
            "crate" => Found::Module(0),
            "self" => Found::Module(module),
            "super" => Found::Module(self.modules[module].parent),
            name => self.look(module, name, rest.is_empty(), hops)?,
        };
        for (index, name) in rest.iter().enumerate() {
            let Found::Module(here) = found else {
                break;
            };
            found = match name.as_str() {
                "self" => found,
                "super" => Found::Module(self.modules[here].parent),
                // What a macro declares is taken for an item of the module.
                name => self
                    .look(here, name, index + 1 == rest.len(), hops)
                    .unwrap_or(Found::Item(here)),
            };
        }
        Some(found)
    }

    fn draw(&self, module: usize, src: &str, graph: &mut Graph) {
        let here = &self.modules[module];
        let mut add = |found: Found, line: usize| {
            let to = &self.modules[found.module()].file;
            let from = &here.file[src.len()..];
            graph.add(from, &to[src.len()..], &format!("{from}:{line}"));
        };
        for import in &here.imports {
            let used = !import.public || here.words.contains(&import.name);
            match self.lead(module, &import.path, HOPS_MAX) {
                // A module by itself is used where a path begins with it.
                Some(found @ Found::Module(_)) if import.name == "*" && used => {
                    add(found, import.line);
                }
                Some(found @ Found::Item(_)) if used => add(found, import.line),
                _ => {}
            }
        }
        for one in &here.uses {
            if let Some(found) = self.lead(module, &one.path, HOPS_MAX) {
                add(found, one.line);
            }
        }
    }
}

/// The name at a place.
fn word(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at) {
        Some(TokenTree::Ident(name)) => Some(name.to_string()),
        _ => None,
    }
}

fn is(tokens: &[TokenTree], at: usize, punct: char) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(one)) if one.as_char() == punct)
}

fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    let joint =
        |one: &TokenTree| matches!(one, TokenTree::Punct(one) if one.spacing() == Spacing::Joint);
    is(tokens, at, ':') && is(tokens, at + 1, ':') && joint(&tokens[at])
}

/// Where reading goes on behind an attribute: behind the item too when only tests have that.
fn attribute(tokens: &[TokenTree], at: usize) -> usize {
    let at = at + 1 + usize::from(is(tokens, at + 1, '!'));
    let Some(TokenTree::Group(group)) = tokens.get(at) else {
        return at;
    };
    let inside: Vec<TokenTree> = group.stream().into_iter().collect();
    let only_tests = word(&inside, 0).as_deref() == Some("cfg") && needs_test(inside);
    if !only_tests {
        return at + 1;
    }
    let mut end = at + 1;
    let mut item = false;
    while let Some(token) = tokens.get(end) {
        let name = word(tokens, end).unwrap_or_default();
        item |= ITEMS.contains(&name.as_str())
            || ["impl", "mod", "use", "macro_rules"].contains(&name.as_str());
        let body =
            matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
        end += 1;
        if body || is(tokens, end - 1, ';') || !item && is(tokens, end - 1, ',') {
            break;
        }
    }
    end
}

/// Whether a condition names `test`, but for what stands in `not(…)`.
fn needs_test(tokens: Vec<TokenTree>) -> bool {
    let mut negated = false;
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(name) => {
            negated = name == "not";
            name == "test"
        }
        TokenTree::Group(group) if !negated => needs_test(group.stream().into_iter().collect()),
        _ => false,
    })
}

/// The names that a `use` tree brings in, each with its whole path.
fn leaf(tokens: &[TokenTree], stem: &mut Path, leaves: &mut Vec<(String, Path)>) {
    let depth = stem.len();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(name) if name == "as" => {
                let name = word(tokens, at + 1).unwrap_or_default();
                leaves.push((name, stem.clone()));
                stem.truncate(depth);
                at += 1;
            }
            TokenTree::Ident(name) => stem.push(name.to_string()),
            TokenTree::Group(group) => {
                let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                leaf(&inside, stem, leaves);
                stem.truncate(depth);
            }
            TokenTree::Punct(one) if one.as_char() == '*' => {
                leaves.push(("*".to_owned(), stem.clone()));
                stem.truncate(depth);
            }
            TokenTree::Punct(one) if one.as_char() == ',' => end_leaf(stem, depth, leaves),
            _ => {}
        }
        at += 1;
    }
    end_leaf(stem, depth, leaves);
}

fn end_leaf(stem: &mut Path, depth: usize, leaves: &mut Vec<(String, Path)>) {
    if stem.len() > depth {
        let name = match stem.as_slice() {
            [.., module, last] if last == "self" => module,
            [.., last] => last,
            [] => return,
        };
        leaves.push((name.clone(), stem.clone()));
    }
    stem.truncate(depth);
}

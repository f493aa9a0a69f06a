//! The free extents of a bin as a treap ordered by (length, start): a search tree by key that is
//! also a heap by priority. Priorities are a hash of the node's number, so they take no memory and
//! the tree stays balanced in expectation whatever the order of operations.

use crate::word::{Word, mix};
use alloc::vec::Vec;

/// No node.
pub(crate) const NIL: u32 = u32::MAX;

/// Which child, an index into [`Node::child`].
const LEFT: usize = 0;
const RIGHT: usize = 1;

/// A free extent, in granules. A length of zero marks a node that is not in use.
#[derive(Debug, Clone, Copy)]
struct Node<W> {
    start: W,
    len: W,
    child: [u32; 2],
}

/// The nodes of all trees, in one slab; unused ones form a list.
#[derive(Debug, Clone)]
pub(crate) struct Nodes<W> {
    nodes: Vec<Node<W>>,
    unused: u32,
}

/// A place that refers to a node: a tree's root, or a child of another node.
#[derive(Clone, Copy)]
struct Link {
    /// [`NIL`] for the root.
    parent: u32,
    side: usize,
}

const ROOT: Link = Link {
    parent: NIL,
    side: LEFT,
};

#[inline]
const fn priority(id: u32) -> u64 {
    mix(id as u64 + 1)
}

impl<W: Word> Nodes<W> {
    pub(crate) const fn new() -> Self {
        Self {
            nodes: Vec::new(),
            unused: NIL,
        }
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node<W>>()
    }

    pub(crate) fn reserve(&mut self, nodes: usize) {
        self.nodes
            .reserve_exact(nodes.saturating_sub(self.nodes.len()));
    }

    #[inline]
    pub(crate) fn start(&self, id: u32) -> u64 {
        self.nodes[id as usize].start.get()
    }

    #[inline]
    pub(crate) fn len(&self, id: u32) -> u64 {
        self.nodes[id as usize].len.get()
    }

    #[inline]
    fn child(&self, id: u32, side: usize) -> u32 {
        self.nodes[id as usize].child[side]
    }

    /// What trees are ordered by: (length, start).
    #[inline]
    pub(crate) fn key(&self, id: u32) -> (u64, u64) {
        let node = &self.nodes[id as usize];
        (node.len.get(), node.start.get())
    }

    /// A node for this extent, in no tree yet.
    pub(crate) fn create(&mut self, start: u64, len: u64) -> u32 {
        let node = Node {
            start: W::pack(start),
            len: W::pack(len),
            child: [NIL, NIL],
        };
        if self.unused == NIL {
            self.nodes.push(node);
            // The pool bounds its live extents, and there is at most one free extent more.
            return (self.nodes.len() - 1) as u32;
        }
        let id = self.unused;
        self.unused = self.child(id, LEFT);
        self.nodes[id as usize] = node;
        id
    }

    /// Changes the extent of a node that is in no tree.
    #[inline]
    pub(crate) fn update(&mut self, id: u32, start: u64, len: u64) {
        let node = &mut self.nodes[id as usize];
        (node.start, node.len) = (W::pack(start), W::pack(len));
    }

    /// Gives a node back that is in no tree.
    pub(crate) fn discard(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        node.len = W::pack(0);
        node.child = [self.unused, NIL];
        self.unused = id;
    }

    /// All extents as (start, length), in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.nodes
            .iter()
            .map(|node| (node.start.get(), node.len.get()))
            .filter(|node| node.1 != 0)
    }

    #[inline]
    fn set(&mut self, root: &mut u32, link: Link, id: u32) {
        if link.parent == NIL {
            *root = id;
        } else {
            self.nodes[link.parent as usize].child[link.side] = id;
        }
    }

    /// Puts a node into a tree.
    #[inline]
    pub(crate) fn insert(&mut self, root: &mut u32, id: u32) {
        self.nodes[id as usize].child = [NIL, NIL];
        if *root == NIL {
            *root = id;
            return;
        }
        let (key, rank) = (self.key(id), priority(id));
        let (mut link, mut at) = (ROOT, *root);
        while at != NIL && priority(at) > rank {
            let side = usize::from(key > self.key(at));
            link = Link { parent: at, side };
            at = self.child(at, side);
        }
        self.set(root, link, id);
        // What was below becomes the node's children: smaller ones left, larger ones right.
        let mut open = [
            Link {
                parent: id,
                side: LEFT,
            },
            Link {
                parent: id,
                side: RIGHT,
            },
        ];
        while at != NIL {
            let side = usize::from(self.key(at) > key);
            self.set(root, open[side], at);
            open[side] = Link {
                parent: at,
                side: 1 - side,
            };
            at = self.child(at, 1 - side);
        }
        self.set(root, open[LEFT], NIL);
        self.set(root, open[RIGHT], NIL);
    }

    /// Takes a node out of its tree.
    #[inline]
    pub(crate) fn remove(&mut self, root: &mut u32, id: u32) {
        let key = self.key(id);
        let (mut link, mut at) = (ROOT, *root);
        while at != id {
            let side = usize::from(key > self.key(at));
            link = Link { parent: at, side };
            at = self.child(at, side);
        }
        let (mut left, mut right) = (self.child(id, LEFT), self.child(id, RIGHT));
        while left != NIL && right != NIL {
            if priority(left) > priority(right) {
                self.set(root, link, left);
                link = Link {
                    parent: left,
                    side: RIGHT,
                };
                left = self.child(left, RIGHT);
            } else {
                self.set(root, link, right);
                link = Link {
                    parent: right,
                    side: LEFT,
                };
                right = self.child(right, LEFT);
            }
        }
        self.set(root, link, if left == NIL { right } else { left });
    }

    /// The smallest extent of at least this length, the lowest of equals; [`NIL`] if none is.
    #[inline]
    pub(crate) fn at_least(&self, root: u32, len: u64) -> u32 {
        let (mut at, mut best) = (root, NIL);
        while at != NIL {
            let fits = self.len(at) >= len;
            if fits {
                best = at;
            }
            at = self.child(at, usize::from(!fits));
        }
        best
    }

    /// The last extent by (length, start) of a tree that is not empty.
    #[inline]
    pub(crate) fn last(&self, root: u32) -> u32 {
        let mut at = root;
        while self.child(at, RIGHT) != NIL {
            at = self.child(at, RIGHT);
        }
        at
    }

    /// Visits a tree from the largest extent down until the visitor says false. Gives false then.
    pub(crate) fn descend(&self, root: u32, visit: &mut impl FnMut(u32) -> bool) -> bool {
        root == NIL
            || (self.descend(self.child(root, RIGHT), visit)
                && visit(root)
                && self.descend(self.child(root, LEFT), visit))
    }

    /// Builds a tree in linear time from new nodes in key order. `spine` is scratch memory.
    pub(crate) fn build(
        &mut self,
        extents: impl Iterator<Item = (u64, u64)>,
        spine: &mut Vec<u32>,
        mut created: impl FnMut(u32),
    ) -> u32 {
        spine.clear();
        for (start, len) in extents {
            let id = self.create(start, len);
            created(id);
            // The rightmost path, without the nodes that the new one outranks.
            let mut below = NIL;
            while let Some(&last) = spine.last()
                && priority(last) < priority(id)
            {
                below = last;
                spine.pop();
            }
            self.nodes[id as usize].child[LEFT] = below;
            if let Some(&last) = spine.last() {
                self.nodes[last as usize].child[RIGHT] = id;
            }
            spine.push(id);
        }
        spine.first().copied().unwrap_or(NIL)
    }

    /// Whether the heap order holds between each node of a tree and its children.
    pub(crate) fn is_heap(&self, root: u32) -> bool {
        [LEFT, RIGHT].into_iter().all(|side| {
            let child = if root == NIL {
                NIL
            } else {
                self.child(root, side)
            };
            child == NIL || (priority(child) < priority(root) && self.is_heap(child))
        })
    }
}

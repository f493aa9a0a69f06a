//! What is used of libibverbs, laid out as `infiniband/verbs.h` has it.
//!
//! Of what the library allocates only the beginning is declared, which is reached by pointers. What
//! is passed to it is declared whole; sizes and offsets are those that a C compiler gives, and the
//! compiler checks them below. They are part of the library's ABI (`IBVERBS_1.1`).

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `struct ibv_device`, of which only the library knows more.
#[repr(C)]
pub(super) struct Listed {
    _opaque: [u8; 0],
}

/// `struct ibv_pd`.
#[repr(C)]
pub(super) struct Pd {
    _opaque: [u8; 0],
}

/// `struct ibv_context`: an open device. More fields follow.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Listed,
    pub(super) ops: Ops,
}

/// `struct ibv_context_ops`: what a driver answers itself. The slots between are of no use here, or
/// were replaced by functions of the library.
#[repr(C)]
pub(super) struct Ops {
    pub(super) unused_0: [usize; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub(super) unused_13: [usize; 12],
    pub(super) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(super) unused_26: [usize; 6],
}

/// `struct ibv_comp_channel`: a descriptor that wakes up. More fields follow.
#[repr(C)]
pub(super) struct Channel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
}

/// `struct ibv_cq`: a completion queue. More fields follow.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// `struct ibv_qp`: a queue pair. More fields follow.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut Pd,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

/// `struct ibv_mr`: memory that is registered.
#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gid(pub(super) [u8; 16]);

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [u64; 8],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) unused_160: [u32; 16],
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct PortAttr {
    pub(super) state: c_int,
    pub(super) max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

/// `IBV_PORT_ACTIVE`.
pub(super) const PORT_ACTIVE: c_int = 4;
/// `IBV_LINK_LAYER_ETHERNET`; what else there is are InfiniBand and, of old, nothing said.
pub(super) const LINK_ETHERNET: u8 = 2;

/// `enum ibv_access_flags`.
pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(super) const ACCESS_REMOTE_READ: c_int = 1 << 2;

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

/// `IBV_QPT_RC`.
pub(super) const QPT_RC: c_int = 2;

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct GlobalRoute {
    pub(super) dgid: Gid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_int,
    pub(super) cur_qp_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) path_mig_state: c_int,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_int,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `enum ibv_qp_state`.
pub(super) const STATE_INIT: c_int = 1;
pub(super) const STATE_RTR: c_int = 2;
pub(super) const STATE_RTS: c_int = 3;
pub(super) const STATE_ERR: c_int = 6;

/// `enum ibv_qp_attr_mask`: what of a `QpAttr` is to be looked at.
pub(super) const ATTR_STATE: c_int = 1;
/// State, access flags, partition key, port: what INIT asks for.
pub(super) const ATTRS_INIT: c_int = ATTR_STATE | 1 << 3 | 1 << 4 | 1 << 5;
/// State, address, MTU, first number awaited, READs served, timer of a receiver that is not ready,
/// the peer's number: what RTR asks for.
pub(super) const ATTRS_RTR: c_int =
    ATTR_STATE | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
/// State, timeout, retries, retries where the receiver is not ready, READs at once, first number:
/// what RTS asks for.
pub(super) const ATTRS_RTS: c_int = ATTR_STATE | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;

/// `struct ibv_sge`: a piece of this side's memory.
#[repr(C)]
#[derive(Clone, Debug)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr`: a work request, as READ and WRITE use it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_int,
    pub(super) send_flags: c_uint,
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    /// What other kinds of requests have there.
    pub(super) unused_52: [u32; 19],
}

/// `IBV_WR_RDMA_WRITE` and `IBV_WR_RDMA_READ`.
pub(super) const WR_WRITE: c_int = 0;
pub(super) const WR_READ: c_int = 4;
/// `IBV_SEND_SIGNALED`: a success is told, too.
pub(super) const SIGNALED: c_uint = 1 << 1;

/// `struct ibv_wc`: a completion.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_int,
    pub(super) opcode: c_int,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Ops>() == 256 && offset_of!(Context, ops) == 8);
    assert!(offset_of!(Ops, poll_cq) == 88 && offset_of!(Ops, req_notify_cq) == 96);
    assert!(offset_of!(Ops, post_send) == 200);
    assert!(offset_of!(Channel, fd) == 8 && offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(DeviceAttr, max_sge_rd) == 124 && offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, max_msg_sz) == 20);
    assert!(offset_of!(PortAttr, lid) == 34 && offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, cap) == 32);
    assert!(offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<AhAttr>() == 32 && size_of::<GlobalRoute>() == 24);
    assert!(offset_of!(AhAttr, dlid) == 24 && offset_of!(AhAttr, port_num) == 30);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, qp_access_flags) == 32);
    assert!(offset_of!(QpAttr, ah_attr) == 56 && offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126 && offset_of!(QpAttr, timeout) == 130);
    assert!(offset_of!(QpAttr, rate_limit) == 136);
    assert!(ATTRS_INIT == 57 && ATTRS_RTR == 1_216_897 && ATTRS_RTS == 77_313);
    assert!(size_of::<Sge>() == 16 && size_of::<SendWr>() == 128);
    assert!(offset_of!(SendWr, send_flags) == 32 && offset_of!(SendWr, remote_addr) == 40);
    assert!(offset_of!(SendWr, rkey) == 48);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, status) == 8);
    assert!(offset_of!(Wc, vendor_err) == 16 && offset_of!(Wc, qp_num) == 28);
};

/// The library's functions, named as there.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "the library's own names")]
pub(super) struct Functions {
    pub(super) ibv_get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut Listed,
    pub(super) ibv_free_device_list: unsafe extern "C" fn(*mut *mut Listed),
    pub(super) ibv_get_device_name: unsafe extern "C" fn(*mut Listed) -> *const c_char,
    pub(super) ibv_open_device: unsafe extern "C" fn(*mut Listed) -> *mut Context,
    pub(super) ibv_close_device: unsafe extern "C" fn(*mut Context) -> c_int,
    pub(super) ibv_query_device: unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int,
    /// Fills all but the last two bytes: it is the one of before those were added. Newer programs
    /// find the one of the driver by a table, for these two bytes.
    pub(super) ibv_query_port: unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int,
    pub(super) ibv_query_gid: unsafe extern "C" fn(*mut Context, u8, c_int, *mut Gid) -> c_int,
    pub(super) ibv_alloc_pd: unsafe extern "C" fn(*mut Context) -> *mut Pd,
    pub(super) ibv_dealloc_pd: unsafe extern "C" fn(*mut Pd) -> c_int,
    pub(super) ibv_reg_mr: unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr,
    pub(super) ibv_dereg_mr: unsafe extern "C" fn(*mut Mr) -> c_int,
    pub(super) ibv_create_comp_channel: unsafe extern "C" fn(*mut Context) -> *mut Channel,
    pub(super) ibv_destroy_comp_channel: unsafe extern "C" fn(*mut Channel) -> c_int,
    pub(super) ibv_create_cq:
        unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq,
    pub(super) ibv_destroy_cq: unsafe extern "C" fn(*mut Cq) -> c_int,
    pub(super) ibv_get_cq_event:
        unsafe extern "C" fn(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int,
    pub(super) ibv_ack_cq_events: unsafe extern "C" fn(*mut Cq, c_uint),
    pub(super) ibv_create_qp: unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp,
    pub(super) ibv_modify_qp: unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int,
    pub(super) ibv_destroy_qp: unsafe extern "C" fn(*mut Qp) -> c_int,
}
